// The page: connects to the server, completes prompts, holds a conversation, and keeps both over a reload. Read the files in this order:
// form (the request), stream (sending it), recording (the answer), conversation (turns), pane (growing text) and log (turns on the page),
// meter and histogram (figures), replay.

import { copy, download } from "./clipboard.js";
import { Conversation } from "./conversation.js";
import { EXAMPLES } from "./examples.js";
import { asCurl, isChat, readRequest, readSettings, writeSettings } from "./form.js";
import { Log } from "./log.js";
import { clear, showConditions, showDetails, showProgress } from "./meter.js";
import { Pane } from "./pane.js";
import { Recording } from "./recording.js";
import { Replay } from "./replay.js";
import { load, save } from "./store.js";
import { ask, explain, stream } from "./stream.js";

const byId = (id) => document.getElementById(id);
const form = byId("request");
const prompt = form.elements.prompt;
const METER_MS = 200; // time between updates of the figures, so that they can be read
const RETRY_MS = 1000;
const touch = matchMedia("(pointer: coarse)"); // on such devices Enter starts a new line

let key = ""; // kept only in memory
let model = null;
let running = null; // AbortController of the request
let completion = null; // the recording of the last completion
let conversation = new Conversation();
let selected = null; // the turn whose figures are shown
let replayed = false; // whether the replay is shown beside the conversation
let example = null;
let wanted = "chat"; // the mode that the user prefers, if the model supports it

const answer = new Pane(byId("answer"));
const log = new Log(byId("log"), (name, turn) => ACTIONS[name](turn), change);
const state = (text) => (byId("state").textContent = text);
const announce = (text) => (byId("announcement").textContent = text);
const replay = new Replay(new Pane(byId("replay")), enable, announce);

const ready = () => !running && Boolean(model?.conditions);

/** The recording whose figures are shown. */
const current = () => (isChat() ? selected?.recording : completion) ?? null;

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
    const [plain, chat] = form.elements.mode;
    chat.disabled = !model.chat;
    (wanted === "chat" && model.chat ? chat : plain).checked = true;
    byId("no-chat").hidden = model.chat;
    setMode();
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

async function complete() {
  completion = new Recording(model, readRequest(model));
  replay.use(null);
  answer.clear(prompt.value);
  await run(completion, answer);
}

/** Adds a turn and lets the model answer it. If no token arrives, removes the turn, shows `instead`, and calls giveBack(). */
async function say(parent, message, giveBack, instead = null) {
  const turn = conversation.add(parent, message);
  turn.recording = new Recording(model, readRequest(model, turn, conversation.key));
  selected = turn;
  replayed = false;
  replay.use(null);
  const ended = run(turn.recording, log.view(turn).pane, () => log.view(turn).showFigures());
  log.toEnd();
  const problem = await ended;
  if (!problem || turn.recording.tokens) return;
  conversation.remove(turn, instead);
  selected = instead ?? conversation.path.at(-1) ?? null;
  showAll();
  giveBack();
  keep();
}

/** Receives an answer into its pane. onProgress: called every METER_MS while it grows. Returns the problem that ended it, or null. */
async function run(recording, pane, onProgress = () => {}) {
  const stop = (running = new AbortController());
  showProblem(null);
  announce("");
  state("waiting for the first token");
  showAll();
  const { top } = byId("stage").getBoundingClientRect();
  if (top > innerHeight / (isChat() ? 3 : 2)) byId(isChat() ? "stage" : "results").scrollIntoView();
  const began = performance.now();
  let read = 0;
  const frame = (now) => {
    if (running !== stop) return;
    pane.show(recording, recording.text.length, now);
    if (now - read > METER_MS) {
      read = now;
      onProgress();
      if (current() === recording) showFigures(recording, performance.now() - began);
    }
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
  let problem = null;
  try {
    await stream(
      recording.request, key, stop.signal,
      (events) => {
        if (!recording.tokens) state("running");
        recording.add(events, performance.now() - began);
      },
      (before) => state(before === 1 ? "1 request before this one" : `${before} requests before this one`),
    );
  } catch (error) {
    problem = error;
  }
  recording.elapsed = performance.now() - began;
  recording.outcome = !problem ? "complete" : problem.name === "AbortError" ? "stopped" : "incomplete";
  running = null;
  const follows = isChat() && log.atEnd;
  pane.finish(recording);
  showAll();
  if (follows) log.toEnd();
  end(recording, problem);
  keep();
  return problem;
}

/** Shows how a run ended, and announces it to screen readers. */
function end(recording, problem) {
  const count = `${recording.tokens.toLocaleString("en")} tokens`;
  if (problem?.name === "AbortError") {
    state(`stopped after ${count}`);
    announce(`Stopped after ${count}.`);
  } else if (problem) {
    state(recording.tokens ? `ended after ${count}: the answer is incomplete` : "no answer");
    if (problem.status === 401) askForKey(problem);
    else showProblem(explain(problem));
  } else {
    const rate = recording.rate === null ? "" : ` at ${Math.round(recording.rate).toLocaleString("en")} tokens per second`;
    state("complete");
    announce(`Finished: ${count}${rate}.`);
  }
}

function halt() {
  running?.abort();
  replay.stop();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!ready()) return;
  if (!isChat()) {
    complete();
    return;
  }
  const message = prompt.value;
  prompt.value = "";
  say(conversation.last, message, () => (prompt.value = [message, prompt.value].filter(Boolean).join("\n\n")));
});
byId("stop").addEventListener("click", halt);
addEventListener("keydown", (event) => {
  const sends = event.ctrlKey || event.metaKey || (event.target === prompt && isChat() && !event.shiftKey && !touch.matches);
  if (event.key === "Enter" && sends && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  } else if (event.key === "Escape" && (running || replay.running)) {
    event.preventDefault();
    halt();
  }
});

// ---- the conversation

/** Sends a turn's message with another text. Returns whether it was sent. */
function change(turn, message) {
  if (!ready()) {
    if (running) showProblem(["The model is still answering.", "Stop it or wait until it has finished, then send this."]);
    return false;
  }
  say(turn.parent, message, () => log.edit(turn, message), turn);
  prompt.focus();
  return true;
}

/** Shows another version of a turn, and the turns that followed that version. */
function turnTo(turn, steps, button) {
  const version = turn.versions[turn.number + steps];
  conversation.choose(version);
  selected = version;
  showAll();
  log.focus(version, button);
  keep();
}

const ACTIONS = {
  edit: (turn) => log.edit(turn),
  retry(turn) {
    if (!ready()) return;
    say(turn.parent, turn.message, () => {}, turn);
    log.focus(selected, "retry");
  },
  replay(turn) {
    selected = turn;
    replayed = true;
    showAll();
    replay.start();
  },
  select(turn) {
    selected = turn;
    showAll();
  },
  earlier: (turn) => turnTo(turn, -1, "earlier"),
  later: (turn) => turnTo(turn, 1, "later"),
};

byId("new").addEventListener("click", () => {
  if (running) return;
  conversation = new Conversation();
  selected = null;
  replayed = false;
  log.views.clear();
  state("ready");
  showProblem(null);
  showAll();
  prompt.focus();
  keep();
});

// ---- copies and downloads

byId("copy-text").addEventListener("click", ({ target }) => current() && copy(target, current().text, announce));
byId("copy-curl").addEventListener("click", ({ target }) => {
  if (!model) return;
  const recording = current();
  const first = isChat() ? { messages: [{ role: "user", content: prompt.value }] } : null;
  copy(target, asCurl(recording?.request ?? readRequest(model, first), recording?.final?.seed, key), announce);
});
byId("download").addEventListener("click", () => current() && !running && download(current()));

// ---- the page

/** Shows everything that depends on the state. */
function showAll() {
  const recording = current();
  const chat = isChat();
  const path = conversation.path;
  if (chat) log.show(path, selected, running !== null);
  byId("answer").hidden = chat;
  byId("log").hidden = !chat;
  byId("replay-pane").hidden = chat && !replayed;
  byId("new").hidden = !chat;
  byId("examples").hidden = chat && path.length > 0;
  if (!running) {
    const source = recording && { recording, pane: chat ? log.view(selected).pane : answer };
    if (recording !== replay.recording) replay.use(source);
  }
  if (recording) showFigures(recording, recording.elapsed ?? 0);
  else clear();
  if (model || recording) showConditions(model, recording);
  enable();
}

function showFigures(recording, elapsed) {
  showProgress(recording, elapsed);
  showDetails(recording);
}

/** Marks buttons as enabled or disabled. They are not really disabled, because a disabled button loses the focus. */
function enable() {
  const some = current()?.tokens;
  const able = { run: !running, stop: running || replay.running, play: !running && some, "copy-text": some, download: !running && some,
                 new: !running && conversation.path.length };
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

function useExample(chosen) {
  example = chosen;
  prompt.value = chosen[isChat() ? "chat" : "completion"];
}

for (const each of EXAMPLES) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = each.name;
  button.addEventListener("click", () => useExample(each));
  byId("examples").append(button);
}

const MAC = /Mac|iPhone|iPad/.test(navigator.userAgent);

/** Arranges the page for the chosen mode: a prompt comes before its answer, a message after the conversation. */
function setMode() {
  const chat = isChat();
  const before = example?.[chat ? "completion" : "chat"];
  if (prompt.value === before) useExample(example);
  const main = document.querySelector("main");
  if (main.dataset.mode !== form.elements.mode.value) {
    main.dataset.mode = form.elements.mode.value;
    if (chat) main.append(byId("results"), byId("composer"), form, byId("details"));
    else main.append(byId("composer"), form, byId("results"), byId("details"));
  }
  byId("prompt-label").textContent = chat ? "Message" : "Prompt";
  byId("answer-title-words").textContent = chat ? "Conversation" : "Answer";
  byId("run-words").textContent = chat ? "Send" : "Run";
  byId("run-key").textContent = chat ? "Enter" : MAC ? "⌘ ⏎" : "Ctrl Enter";
  showAll();
}

form.elements.mode.forEach((choice) =>
  choice.addEventListener("change", () => {
    wanted = choice.value;
    setMode();
  }),
);

const THEMES = ["auto", "light", "dark"];
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
}
byId("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % 3]));

byId("tint").addEventListener("change", ({ target }) => byId("stage").classList.toggle("tinted", target.checked));

// ---- state that a reload keeps

function keep() {
  const data = (brief) => ({
    mode: wanted,
    settings: readSettings(),
    prompt: prompt.value,
    theme: document.documentElement.dataset.theme,
    conversation: conversation.saved(brief),
    completion: completion?.saved(brief),
  });
  if (!save(data) && conversation.path.length) showProblem(["A reload would lose this conversation.", "The browser has no room to store it."]);
}

function restore() {
  setTheme("auto");
  const saved = load();
  if (!saved) {
    useExample(EXAMPLES[0]);
    return;
  }
  writeSettings(saved.settings);
  wanted = saved.mode;
  if (wanted === "chat") form.elements.mode[1].checked = true; // now, so that the page does not change when the model is known
  if (THEMES.includes(saved.theme)) setTheme(saved.theme);
  try {
    const [made, unanswered] = Conversation.restored(saved.conversation);
    conversation = made;
    prompt.value = [unanswered, saved.prompt].filter(Boolean).join("\n\n");
    selected = conversation.path.at(-1) ?? null;
    if (saved.completion?.text) {
      completion = Recording.restored(saved.completion);
      answer.clear(completion.request.body.prompt);
      answer.finish(completion);
    }
  } catch {
    conversation = new Conversation(); // saved by another version of this page
  }
}

addEventListener("pagehide", keep);
restore();
setMode();
log.toEnd();
connect();
