// The page: connects, runs, stops, replays. Reading order: form (what is asked), stream (how), recording (what came), pane (its text),
// meter and histogram (its figures).

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
const METER_MS = 200; // between two readings of the figures: faster ones cannot be read
const RETRY_MS = 1000;
const COPIED_MS = 1200;
const [SLOWEST, FASTEST] = [30, 3000];
const PRESETS = [30, 100, 300, 1000, 3000];

let key = ""; // in memory alone
let model = null;
let recording = null;
let running = null; // AbortController of the request
let playing = null; // and of the replay
let example = null;

// ---- the server

async function connect() {
  try {
    const list = await (await ask("v1/models", key)).json();
    model = list.data[0];
    byId("key-form").hidden = true;
    byId("model").textContent = model.id;
    const ready = "conditions" in model;
    showProblem(ready ? null : ["The model is loading.", "This page goes on by itself when it is there."]);
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
      (before) => state(before === 1 ? "one request is before this one" : `${before} requests are before this one`),
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

/** Says how a run ended, to the eyes and to a screen reader. */
function end(current, problem) {
  const count = `${current.tokens.toLocaleString("en")} tokens`;
  if (problem?.name === "AbortError") {
    state(`stopped after ${count}`);
    announce(`Stopped after ${count}.`);
  } else if (problem) {
    state(current.tokens ? `ended after ${count}: not the whole answer` : "no answer");
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

/** To two figures, as the slider is no finer than that. */
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
  let said = 0;
  const onFrame = (ms) => {
    if (ms - said < METER_MS) return;
    said = ms;
    replayState(`${(ms / 1000).toFixed(2)} of ${wanted}`);
  };
  const original = play(current, answer, chat, (ms) => current.tokensAt(ms), stop.signal);
  const took = await play(current, replay, chat, (ms) => 1 + Math.floor((ms * rate) / 1000), stop.signal, onFrame);
  if (playing === stop) replayState(took === null ? "stopped" : `${rate.toLocaleString("en")} tok/s took ${(took / 1000).toFixed(2)} s`);
  const whole = (await original) !== null;
  if (playing !== stop) return; // another one has begun
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

// ---- what to take away

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

/** Browsers give the clipboard to pages of this machine and of HTTPS; elsewhere the older way is left. */
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

/** Buttons are marked, not disabled: a disabled one would lose the focus. */
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
