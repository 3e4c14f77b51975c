// The page: connects, runs, stops, replays. Reading order: form (the request), stream (sending it), recording (the answer), pane (its
// text), meter and histogram (its figures).

import { EXAMPLES } from "./examples.js";
import { asCurl, isChat, readRequest } from "./form.js";
import { showConditions, showDetails, showProgress } from "./meter.js";
import { Pane, play } from "./pane.js";
import { Recording } from "./recording.js";
import { ask, explain, stream } from "./stream.js";

const byId = (id) => document.getElementById(id);
const form = byId("request");
const answer = new Pane(byId("answer"));
const replay = new Pane(byId("replay"));
const METER_MS = 200; // between updates of the figures, so that they can be read
const RETRY_MS = 1000;
const COPIED_MS = 1200;
const [SLOWEST, FASTEST] = [30, 3000];
const PRESETS = [30, 100, 300, 1000, 3000];

let key = ""; // kept only in memory
let model = null;
let recording = null;
let running = null; // AbortController of the request
let playing = null; // AbortController of the replay
let example = null;

// ---- the server

async function connect() {
  try {
    const list = await (await ask("v1/models", key)).json();
    model = list.data[0];
    byId("key-form").hidden = true;
    byId("model").textContent = model.id;
    const ready = "conditions" in model;
    showProblem(ready ? null : ["The model is loading.", "This page continues when it is ready."]);
    if (!ready) {
      setTimeout(connect, RETRY_MS);
      return;
    }
    const chat = form.elements.mode[1];
    chat.disabled = !model.chat;
    byId("no-chat").hidden = model.chat;
    showConditions(model, null);
  } catch (problem) {
    if (problem.status === 401) askForKey(problem);
    else {
      showProblem(explain(problem));
      setTimeout(connect, RETRY_MS);
    }
  }
}

function askForKey(problem) {
  byId("key-form").hidden = false;
  showProblem(key ? explain(problem) : null);
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  connect();
});

// ---- a run

async function run() {
  if (running || !model?.conditions) return;
  playing?.abort();
  playing = null;
  const stop = (running = new AbortController());
  const request = readRequest(model);
  const current = (recording = new Recording(model, request));
  const chat = isChat();
  answer.clear(chat ? "" : request.body.prompt);
  replay.clear(answer.prompt);
  replayState("");
  showProblem(null);
  announce("");
  state("waiting for the first token");
  enable();
  showConditions(model, current);
  if (byId("results").getBoundingClientRect().top > innerHeight / 2) byId("results").scrollIntoView();

  const began = performance.now();
  let read = 0;
  const frame = (now) => {
    if (running !== stop) return;
    answer.show(current.text, now);
    if (now - read > METER_MS) {
      read = now;
      showProgress(current, performance.now() - began);
      showDetails(current);
    }
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
  let problem = null;
  try {
    await stream(
      request, key, stop.signal,
      (events) => {
        if (!current.tokens) state("running");
        current.add(events, performance.now() - began);
      },
      (before) => state(before === 1 ? "1 request before this one" : `${before} requests before this one`),
    );
  } catch (error) {
    problem = error;
  }
  current.elapsed = performance.now() - began;
  running = null;
  answer.finish(current.text, chat);
  showProgress(current, current.elapsed);
  showDetails(current);
  showConditions(model, current);
  enable();
  end(current, problem);
}

/** Shows how a run ended, and announces it to screen readers. */
function end(current, problem) {
  const count = `${current.tokens.toLocaleString("en")} tokens`;
  if (problem?.name === "AbortError") {
    state(`stopped after ${count}`);
    announce(`Stopped after ${count}.`);
  } else if (problem) {
    state(current.tokens ? `ended after ${count}: the answer is incomplete` : "no answer");
    if (problem.status === 401) askForKey(problem);
    else showProblem(explain(problem));
  } else {
    const rate = current.rate === null ? "" : ` at ${Math.round(current.rate).toLocaleString("en")} tokens per second`;
    state("complete");
    announce(`Finished: ${count}${rate}.`);
  }
}

function halt() {
  running?.abort();
  playing?.abort();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
byId("stop").addEventListener("click", halt);
addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    form.requestSubmit();
  } else if (event.key === "Escape" && (running || playing)) {
    event.preventDefault();
    halt();
  }
});

// ---- the replay

const speed = () => Math.round(SLOWEST * (FASTEST / SLOWEST) ** (byId("speed").value / byId("speed").max));
const speedInWords = () => `${rounded(speed()).toLocaleString("en")} tok/s`;

/** Rounded to two significant digits, the precision of the slider. */
function rounded(value) {
  const unit = 10 ** (Math.floor(Math.log10(value)) - 1);
  return Math.round(value / unit) * unit;
}

async function startReplay() {
  if (running || !recording?.tokens) return;
  playing?.abort();
  const stop = (playing = new AbortController());
  const [current, chat, rate] = [recording, "messages" in recording.request.body, rounded(speed())];
  const wanted = `${((current.tokens - 1) / rate).toFixed(2)} s`;
  replayState(`0.00 of ${wanted}`);
  enable();
  let shown = 0;
  const onFrame = (ms) => {
    if (ms - shown < METER_MS) return;
    shown = ms;
    replayState(`${(ms / 1000).toFixed(2)} of ${wanted}`);
  };
  const original = play(current, answer, chat, (ms) => current.tokensAt(ms), stop.signal);
  const took = await play(current, replay, chat, (ms) => 1 + Math.floor((ms * rate) / 1000), stop.signal, onFrame);
  if (playing === stop) replayState(took === null ? "stopped" : `${rate.toLocaleString("en")} tok/s took ${(took / 1000).toFixed(2)} s`);
  const whole = (await original) !== null;
  if (playing !== stop) return; // another replay has started
  if (!whole) answer.finish(current.text, chat);
  playing = null;
  announce(took === null ? "Replay stopped." : "Replay finished.");
  enable();
}

function setSpeed(value) {
  byId("speed").value = (byId("speed").max * Math.log(value / SLOWEST)) / Math.log(FASTEST / SLOWEST);
  showSpeed();
}

function showSpeed() {
  byId("speed-value").textContent = speedInWords();
  byId("speed").setAttribute("aria-valuetext", speedInWords());
}

byId("play").addEventListener("click", startReplay);
byId("speed").addEventListener("input", showSpeed);
byId("speed").addEventListener("change", () => playing && startReplay());
for (const preset of PRESETS) {
  addButton("presets", preset.toLocaleString("en"), () => {
    setSpeed(preset);
    if (playing) startReplay();
  }).setAttribute("aria-label", `${preset} tokens per second`);
}

// ---- copies and downloads

byId("copy-text").addEventListener("click", ({ target }) => recording && copy(target, recording.text));
byId("copy-curl").addEventListener("click", ({ target }) => {
  if (model) copy(target, recording ? asCurl(recording.request, recording.final?.seed, key) : asCurl(readRequest(model), undefined, key));
});
byId("download").addEventListener("click", () => {
  if (!recording || running) return;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(recording, null, 1)], { type: "application/json" }));
  link.download = `laneformer-${recording.date.toISOString().slice(0, 19).replaceAll(":", "")}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), RETRY_MS);
});

async function copy(button, text) {
  const [name, done] = [button.textContent, await copied(text)];
  button.textContent = done ? "Copied" : "Not copied";
  announce(button.textContent);
  setTimeout(() => (button.textContent = name), COPIED_MS);
}

/** Browsers allow the clipboard only for HTTPS and localhost; other pages use execCommand. */
async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

// ---- the page

const state = (text) => (byId("state").textContent = text);
const replayState = (text) => (byId("replay-state").textContent = text);
const announce = (text) => (byId("announcement").textContent = text);

/** Buttons are marked, not disabled, because a disabled button loses the focus. */
function enable() {
  const able = { run: !running, stop: running || playing, play: !running && recording?.tokens, "copy-text": recording?.tokens,
                 download: !running && recording?.tokens };
  for (const [id, can] of Object.entries(able)) byId(id).setAttribute("aria-disabled", String(!can));
}

function showProblem(words) {
  const box = byId("problem");
  box.hidden = !words;
  if (!words) return;
  const [what, remedy] = ["strong", "p"].map((name) => document.createElement(name));
  [what.textContent, remedy.textContent] = words;
  box.replaceChildren(what, " ", remedy);
}

function addButton(into, text, action) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = text;
  button.addEventListener("click", action);
  byId(into).append(button);
  return button;
}

function useExample(chosen) {
  example = chosen;
  byId("prompt").value = chosen[isChat() ? "chat" : "completion"];
}

for (const each of EXAMPLES) addButton("examples", each.name, () => useExample(each));
form.elements.mode.forEach((choice) =>
  choice.addEventListener("change", () => {
    const before = example?.[isChat() ? "completion" : "chat"];
    byId("prompt-label").textContent = isChat() ? "Message" : "Prompt";
    if (byId("prompt").value === before) useExample(example);
  }),
);

const THEMES = ["auto", "light", "dark"];
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
}
byId("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]));
setTheme("auto");

if (/Mac|iPhone|iPad/.test(navigator.userAgent)) byId("run-key").textContent = "⌘ ⏎";
setSpeed(100);
useExample(EXAMPLES[0]);
enable();
connect();
