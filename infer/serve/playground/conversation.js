// A conversation as a tree: an edited message, or another answer to the same message, is a new turn beside the earlier one, so nothing is
// lost. The path of the chosen turns is shown and sent.

import { Recording } from "./recording.js";

/** A message of the user, its answer, and the turns that follow it. */
export class Turn {
  /** parent: the previous turn; null for the root, which has no message. */
  constructor(parent, message) {
    this.parent = parent;
    this.message = message;
    this.draft = null; // the edited message while it is not sent
    this.recording = null;
    this.turns = [];
    this.chosen = 0; // index of the chosen one of its turns
  }

  /** The turns with the same parent. */
  get versions() {
    return this.parent.turns;
  }

  get number() {
    return this.versions.indexOf(this);
  }

  /** The messages of the request that this turn answers. */
  get messages() {
    const before = this.parent.parent ? [...this.parent.messages, answerMessage(this.parent.recording)] : [];
    return [...before, { role: "user", content: this.message }];
  }
}

function answerMessage({ content, reasoning }) {
  return { role: "assistant", content, ...(reasoning ? { reasoning_content: reasoning } : {}) };
}

export class Conversation {
  /** key: names the conversation for the server, which keeps its prefix. */
  constructor(key = newKey()) {
    this.key = key;
    this.root = new Turn(null, null);
  }

  /** The chosen turns, first to last. */
  get path() {
    const found = [];
    for (let turn = this.root; turn.turns.length; found.push(turn)) turn = turn.turns[turn.chosen];
    return found;
  }

  get last() {
    return this.path.at(-1) ?? this.root;
  }

  /** Adds a turn after another one, and chooses it. */
  add(parent, message) {
    const turn = new Turn(parent, message);
    parent.chosen = parent.turns.push(turn) - 1;
    return turn;
  }

  /** Removes a turn that has no answer, and chooses `instead`, or by default the last of the other versions. */
  remove(turn, instead) {
    turn.parent.turns = turn.versions.filter((other) => other !== turn);
    turn.parent.chosen = Math.max(0, instead ? instead.number : turn.parent.turns.length - 1);
  }

  choose(turn) {
    turn.parent.chosen = turn.number;
  }

  /** The conversation as data for JSON. brief: whether to leave out the tokens of answers. */
  saved(brief) {
    const plain = ({ message, draft, recording, turns, chosen }) => ({
      message, draft, recording: recording?.saved(brief), turns: turns.map(plain), chosen,
    });
    return { key: this.key, root: plain(this.root) };
  }

  /** The conversation, and the message of a turn on its path that had no answer yet ("" if none). Throws for data that is not from
   * `saved`. */
  static restored({ key, root }) {
    const made = new Conversation(key);
    let unanswered = "";
    const grow = (turn, saved, shown) => {
      saved.turns.forEach((each, i) => {
        const chosen = shown && i === saved.chosen;
        if (!each.recording?.text && !each.recording?.outcome) {
          if (chosen) unanswered = each.message;
          return;
        }
        const next = made.add(turn, each.message);
        next.draft = each.draft ?? null;
        next.recording = Recording.restored(each.recording, next.messages);
        grow(next, each, chosen);
      });
      turn.chosen = Math.min(saved.chosen, Math.max(0, turn.turns.length - 1));
    };
    grow(made.root, root, true);
    return [made, unanswered];
  }
}

function newKey() {
  return `playground-${Array.from(crypto.getRandomValues(new Uint32Array(2)), (word) => word.toString(36)).join("")}`;
}
