// Growing text: one write per frame into a short last block, so that the cost of a frame does not depend on the length of the text.

import { highlighted } from "./highlight.js";

const BLOCK = 500; // characters after which the next line starts a new block

export const still = matchMedia("(prefers-reduced-motion: reduce)");
const STILL_MS = 500; // between writes if the user prefers reduced motion

export class Pane {
  constructor(element) {
    this.element = element;
    this.clear();
  }

  /** Empties the pane. prompt: shown before the text of a completion. */
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

  /** Shows the text, which starts with what is already shown. now: time of the frame. */
  show(text, now) {
    if (text.length === this.length || (still.matches && now - this.#written < STILL_MS)) return;
    const element = this.element;
    const follows = element.scrollHeight - element.scrollTop - element.clientHeight < 40;
    if (this.length === 0) this.#start();
    this.#written = now;
    this.#append(text.slice(this.length));
    this.length = text.length;
    if (follows) element.scrollTop = element.scrollHeight;
  }

  /** Shows the whole text in colours. prose: whether it is the text of a chat. */
  finish(text, prose) {
    this.#written = -Infinity;
    this.show(text, 0);
    if (!this.length) return;
    const top = this.element.scrollTop;
    this.#text.replaceChildren(highlighted(this.prompt + text, this.prompt.length, prose));
    this.element.scrollTop = top;
  }

  #start() {
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

/** Plays a recording in a pane from its first token on. tokensAt: number of tokens after some ms. Resolves with the duration in ms, or
 * null if it was stopped. */
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
