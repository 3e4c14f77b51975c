// Text that grows: one write per frame, into a short last block, so that a frame costs the same however long the text is.

import { highlighted } from "./highlight.js";

const BLOCK = 500; // characters after which the next line begins a new block

export const still = matchMedia("(prefers-reduced-motion: reduce)");
const STILL_MS = 500; // between writes for those who asked for less motion

export class Pane {
  constructor(element) {
    this.element = element;
    this.clear();
  }

  /** prompt: shown before the text, for a completion of it. */
  clear(prompt = "") {
    this.prompt = prompt;
    this.length = 0;
    this.#written = -Infinity;
    this.element.replaceChildren();
  }

  #written;
  #text;
  #block;
  #size;

  /** Shows the text, of which what was shown before is the beginning. now: of the frame. */
  show(text, now) {
    if (text.length === this.length || (still.matches && now - this.#written < STILL_MS)) return;
    const element = this.element;
    const follows = element.scrollHeight - element.scrollTop - element.clientHeight < 40;
    if (this.length === 0) this.#begin();
    this.#written = now;
    this.#append(text.slice(this.length));
    this.length = text.length;
    if (follows) element.scrollTop = element.scrollHeight;
  }

  /** The end: all of the text, coloured. prose: that of a chat. */
  finish(text, prose) {
    this.#written = -Infinity;
    this.show(text, 0);
    if (!this.length) return;
    const top = this.element.scrollTop;
    this.#text.replaceChildren(highlighted(this.prompt + text, this.prompt.length, prose));
    this.element.scrollTop = top;
  }

  #begin() {
    const prompt = document.createElement("span");
    prompt.className = "prompt";
    prompt.textContent = this.prompt;
    this.#text = document.createElement("span");
    this.#text.className = "text";
    this.#block = this.#text;
    this.#size = 0;
    this.element.replaceChildren(prompt, this.#text);
  }

  #append(text) {
    const line = this.#size + text.length > BLOCK ? text.indexOf("\n") + 1 : 0;
    this.#block.append(text.slice(0, line || text.length));
    this.#size += text.length;
    if (!line) return;
    this.#block = document.createElement("span");
    this.#block.className = "block";
    this.#block.append(text.slice(line));
    this.#size = text.length - line;
    this.#text.append(this.#block);
  }
}

/** Plays a recording in a pane from its first token on. tokensAt: how many have come after some ms. Resolves with the ms it took, or null
 * if it was stopped. */
export function play(recording, pane, prose, tokensAt, signal, onFrame = () => {}) {
  pane.clear(pane.prompt);
  return new Promise((resolve) => {
    let began = null;
    const frame = (now) => {
      if (signal.aborted) {
        resolve(null);
        return;
      }
      began ??= now;
      const tokens = Math.min(tokensAt(now - began), recording.tokens);
      onFrame(now - began);
      if (tokens < recording.tokens) {
        pane.show(recording.upTo(tokens), now);
        requestAnimationFrame(frame);
      } else {
        pane.finish(recording.text, prose);
        resolve(now - began);
      }
    };
    requestAnimationFrame(frame);
  });
}
