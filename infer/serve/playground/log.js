// The conversation on the page: each turn shows a message and its answer, with buttons and figures.

import { summary } from "./meter.js";
import { Pane } from "./pane.js";

/** The elements of one turn. */
class View {
  constructor(turn, log) {
    this.turn = turn;
    this.log = log;
    this.element = make("article", "turn");
    this.message = make("p", "message");
    this.message.textContent = turn.message;
    this.said = make("div", "said");
    this.said.append(make("h3", "who", "You"), this.message);
    const text = make("pre", "answer");
    this.pane = new Pane(text, { scroller: log.element, prose: true });
    this.figures = make("dl", "summary");
    this.note = make("p", "hint note");
    this.buttons = {};
    this.said.append(this.#row(["edit", "Edit"]));
    const [earlier, later] = [["earlier", "‹"], ["later", "›"]];
    this.place = make("span", "hint");
    const row = this.#row(["retry", "Retry"], ["replay", "Replay"], ["select", "Figures"], earlier, later);
    this.versions = make("span", "versions");
    this.versions.append(this.buttons.earlier, this.place, this.buttons.later);
    row.append(this.versions);
    this.element.append(this.said, make("h3", "who", "Model"), text, this.note, this.figures, row);
  }

  #row(...buttons) {
    const row = make("div", "row");
    for (const [name, words] of buttons) {
      const button = (this.buttons[name] = make("button", "", words));
      button.type = "button";
      button.addEventListener("click", () => button.ariaDisabled !== "true" && this.log.act(name, this.turn));
      row.append(button);
    }
    return row;
  }

  /** Updates everything that does not change while the answer grows. number: place of the turn in the conversation, from 1. busy: whether
   * any answer is growing. */
  refresh(number, selected, busy) {
    const { turn, buttons } = this;
    const { recording, versions } = turn;
    this.element.ariaLabel = `Turn ${number}`;
    this.element.classList.toggle("selected", selected);
    const names = { edit: `Edit message ${number}`, retry: `Retry answer ${number}`, replay: `Replay answer ${number}`,
                    select: `Show the figures of answer ${number}`, earlier: `Earlier version of turn ${number}`, later: `Later version of turn ${number}` };
    for (const [name, words] of Object.entries(names)) buttons[name].ariaLabel = words;
    if (turn.draft !== null && !this.said.querySelector("form")) this.edit(); // a draft that a reload restored
    buttons.select.ariaPressed = String(selected);
    const able = { edit: !busy, retry: !busy, replay: !busy && recording?.tokens, select: !busy && recording, earlier: !busy && turn.number > 0,
                   later: !busy && turn.number < versions.length - 1 };
    for (const [name, can] of Object.entries(able)) buttons[name].ariaDisabled = String(!can);
    this.versions.hidden = versions.length < 2;
    this.place.textContent = `${turn.number + 1} of ${versions.length}`;
    const ended = { stopped: "Stopped before its end.", incomplete: "Incomplete." };
    this.note.textContent = recording?.outcome === "complete" && !recording.text ? "The answer is empty." : (ended[recording?.outcome] ?? "");
    this.note.hidden = !this.note.textContent;
    this.showFigures();
  }

  /** Shows the turn's draft in place of its message until it is sent or cancelled. Returns the text area. */
  edit() {
    const { turn, buttons } = this;
    const form = make("form", "editor");
    const area = make("textarea");
    area.value = turn.draft;
    area.rows = Math.min(10, turn.draft.split("\n").length + 1);
    area.required = true;
    area.ariaLabel = buttons.edit.ariaLabel;
    const cancel = make("button", "", "Cancel");
    cancel.type = "button";
    const row = make("div", "row");
    row.append(make("button", "primary", "Send"), cancel);
    form.append(area, row);
    const close = () => {
      turn.draft = null;
      form.remove();
      this.message.hidden = buttons.edit.hidden = false;
      if (this.element.isConnected) buttons.edit.focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.log.send(turn, area.value)) close();
    });
    cancel.addEventListener("click", close);
    area.addEventListener("input", () => (turn.draft = area.value));
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    this.message.hidden = buttons.edit.hidden = true;
    this.said.append(form);
    return area;
  }

  showFigures() {
    const { recording } = this.turn;
    const facts = recording?.tokens ? summary(recording) : [];
    while (this.figures.children.length > facts.length) this.figures.lastChild.remove();
    facts.forEach(([name, value], i) => {
      let pair = this.figures.children[i];
      if (!pair) {
        pair = this.figures.appendChild(make("div"));
        pair.append(make("dt"), make("dd"));
      }
      if (pair.children[0].textContent !== name) pair.children[0].textContent = name;
      if (pair.children[1].textContent !== value) pair.children[1].textContent = value;
    });
  }
}

export class Log {
  /** act: called with the name of a button and its turn: edit, retry, replay, select, earlier, later. send: called with a turn and the
   * changed text of its message; returns whether it was sent. */
  constructor(element, act, send) {
    this.element = element;
    this.act = act;
    this.send = send;
    this.views = new Map();
  }

  /** Shows a path of turns. The elements of turns that are shown already are not touched, so that they keep the focus. */
  show(path, selected, busy) {
    const shown = new Set(path.map((turn) => this.view(turn).element));
    for (const child of [...this.element.children]) if (!shown.has(child)) child.remove();
    path.forEach((turn, i) => {
      const view = this.view(turn);
      if (this.element.children[i] !== view.element) this.element.insertBefore(view.element, this.element.children[i] ?? null);
      view.refresh(i + 1, turn === selected, busy);
    });
  }

  view(turn) {
    if (!this.views.has(turn)) {
      const view = new View(turn, this);
      this.views.set(turn, view);
      if (turn.recording) view.pane.finish(turn.recording);
    }
    return this.views.get(turn);
  }

  /** Puts the focus on a button of a turn. */
  focus(turn, name) {
    this.view(turn).buttons[name].focus();
  }

  /** Whether the log is scrolled to its end, or almost. */
  get atEnd() {
    const { scrollHeight, scrollTop, clientHeight } = this.element;
    return scrollHeight - scrollTop - clientHeight < 100;
  }

  toEnd() {
    this.element.scrollTop = this.element.scrollHeight;
  }

  /** Lets the user change a turn's message. text: initial text. */
  edit(turn, text = turn.message) {
    if (turn.draft !== null) return;
    turn.draft = text;
    this.view(turn).edit().focus();
  }
}

function make(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return made;
}
