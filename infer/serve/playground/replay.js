// The replay of an answer at a chosen speed, beside the same answer at its original speed.

import { play } from "./pane.js";

const byId = (id) => document.getElementById(id);
const SHOWN_MS = 200; // time between updates of the shown time, so that it can be read
const [SLOWEST, FASTEST] = [30, 3000];
const PRESETS = [30, 100, 300, 1000, 3000];

export class Replay {
  #playing = null; // AbortController
  #source = null;

  /** pane: shows the replay. changed: called when it starts or ends. announce: announces a text to screen readers. */
  constructor(pane, changed, announce) {
    this.pane = pane;
    this.changed = changed;
    this.announce = announce;
    byId("play").addEventListener("click", () => this.start());
    byId("speed").addEventListener("input", showSpeed);
    byId("speed").addEventListener("change", () => this.running && this.start());
    for (const preset of PRESETS) byId("presets").append(this.#preset(preset));
    setSpeed(FASTEST);
  }

  #preset(rate) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = rate.toLocaleString("en");
    button.ariaLabel = `${rate} tokens per second`;
    button.addEventListener("click", () => {
      setSpeed(rate);
      if (this.running) this.start();
    });
    return button;
  }

  get running() {
    return this.#playing !== null;
  }

  get recording() {
    return this.#source?.recording ?? null;
  }

  /** Whether there is a recording with tokens to play. */
  get able() {
    return Boolean(this.#source?.recording.tokens);
  }

  /** Sets what to play: a recording and the pane that shows it; null for nothing. Stops a running replay. */
  use(source) {
    if (this.running) {
      this.stop();
      this.#playing = null;
      this.#source.pane.finish(this.#source.recording);
    }
    this.#source = source;
    this.pane.clear(source?.pane.prompt);
    this.pane.prose = source?.pane.prose ?? false;
    state("");
  }

  stop() {
    this.#playing?.abort();
  }

  async start() {
    if (!this.able) return;
    this.stop();
    const stop = (this.#playing = new AbortController());
    const { recording, pane } = this.#source;
    const rate = chosenSpeed();
    const wanted = `${((recording.tokens - 1) / rate).toFixed(2)} s`;
    state(`0.00 of ${wanted}`);
    this.changed();
    let shown = 0;
    const onFrame = (ms) => {
      if (ms - shown < SHOWN_MS) return;
      shown = ms;
      state(`${(ms / 1000).toFixed(2)} of ${wanted}`);
    };
    const original = play(recording, pane, (ms) => recording.tokensAt(ms), stop.signal);
    const took = await play(recording, this.pane, (ms) => 1 + Math.floor((ms * rate) / 1000), stop.signal, onFrame);
    if (this.#playing === stop) state(took === null ? "stopped" : `${rate.toLocaleString("en")} tok/s took ${(took / 1000).toFixed(2)} s`);
    const whole = (await original) !== null;
    if (this.#playing !== stop) return; // another replay has started
    if (!whole) pane.finish(recording);
    this.#playing = null;
    this.announce(took === null ? "Replay stopped." : "Replay finished.");
    this.changed();
  }
}

const state = (text) => (byId("replay-state").textContent = text);

/** The chosen speed in tokens per second, rounded to two significant digits, the precision of the slider. */
function chosenSpeed() {
  const value = Math.round(SLOWEST * (FASTEST / SLOWEST) ** (byId("speed").value / byId("speed").max));
  const unit = 10 ** (Math.floor(Math.log10(value)) - 1);
  return Math.round(value / unit) * unit;
}

function setSpeed(rate) {
  byId("speed").value = (byId("speed").max * Math.log(rate / SLOWEST)) / Math.log(FASTEST / SLOWEST);
  showSpeed();
}

function showSpeed() {
  const words = `${chosenSpeed().toLocaleString("en")} tok/s`;
  byId("speed-value").textContent = words;
  byId("speed").setAttribute("aria-valuetext", words);
}
