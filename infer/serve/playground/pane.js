// Growing text: each frame writes once, into a short last block, so that its cost does not depend on the length of the text.

import { element, highlighted } from "./highlight.js";

const BLOCK = 500; // characters after which the next line starts a new block
const NEAR_END = 40; // a pane that is scrolled to within this many pixels of its end follows its text

export const still = matchMedia("(prefers-reduced-motion: reduce)");
const STILL_MS = 500; // time between writes if the user prefers reduced motion

export class Pane {
  /** scroller: the element that scrolls when the text grows. prose: whether it is the text of a chat, with code only between ```. */
  constructor(element, { scroller = element, prose = false } = {}) {
    this.element = element;
    this.scroller = scroller;
    this.prose = prose;
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

  /** Shows the recording's first `length` characters; appends those that are not shown yet. now: time of the frame. */
  show(recording, length, now) {
    if (length === this.length || (still.matches && now - this.#written < STILL_MS)) return;
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    const follows = scrollHeight - scrollTop - clientHeight < NEAR_END;
    if (this.length === 0) this.#start();
    this.#written = now;
    for (const [start, end, names] of recording.stretches(this.length, length)) this.#append(recording.text.slice(start, end), names);
    this.length = length;
    if (follows) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /** Shows the whole text, with coloured code. */
  finish(recording) {
    this.#written = -Infinity;
    this.show(recording, recording.text.length, 0);
    if (!this.length) return;
    const top = this.scroller.scrollTop;
    const before = this.prompt.length;
    const stretches = Array.from(recording.stretches(0, this.length), ([start, end, names]) => [before + start, before + end, names]);
    this.#text.replaceChildren(highlighted(this.prompt + recording.text, stretches, this.prose));
    this.scroller.scrollTop = top;
  }

  #start() {
    this.#text = element("text");
    this.#block = this.#text;
    this.#size = 0;
    this.element.replaceChildren(element("prompt", this.prompt), this.#text);
  }

  #append(text, names) {
    const line = this.#size + text.length > BLOCK ? text.indexOf("\n") + 1 : 0;
    this.#add(text.slice(0, line || text.length), names);
    this.#size += text.length;
    if (!line) return;
    this.#block = element("block");
    this.#add(text.slice(line), names);
    this.#size = text.length - line;
    this.#text.append(this.#block);
  }

  #add(text, names) {
    this.#block.append(names && text ? element(names, text) : text);
  }
}

/** Plays a recording in a pane from its first token on. tokensAt(ms): number of tokens to show after this time. Resolves with the duration
 * in ms, or null if it was stopped. */
export function play(recording, pane, tokensAt, signal, onFrame = () => {}) {
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
        pane.show(recording, recording.lengthAt(tokens), now);
        requestAnimationFrame(frame);
      } else {
        pane.finish(recording);
        resolve(now - began);
      }
    };
    requestAnimationFrame(frame);
  });
}
