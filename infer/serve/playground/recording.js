// One answer as received: its text, the end of each token in it, the origin of each token, and arrival times by the engine's clock and by
// the clock of this page.

const US = 1000; // per ms

/** A growing array of numbers. */
class Series {
  #data = new Float64Array(4096);
  length = 0;

  push(value) {
    if (this.length === this.#data.length) {
      const larger = new Float64Array(2 * this.length);
      larger.set(this.#data);
      this.#data = larger;
    }
    this.#data[this.length++] = value;
  }

  get values() {
    return this.#data.subarray(0, this.length);
  }

  get last() {
    return this.#data[this.length - 1];
  }
}

export class Recording {
  /** model: as /v1/models reports it. request: path and body. Times are in milliseconds, places in the text in UTF-16 units. */
  constructor(model, request) {
    this.model = model;
    this.request = request;
    this.date = new Date();
    this.text = ""; // including the reasoning
    this.thoughts = []; // [start, end] of each stretch of reasoning in the text
    this.ends = new Series(); // end of each token in the text
    this.times = new Series(); // arrival of each token since the engine started the request, by the engine's clock
    this.drafted = new Series(); // 1 for each token that was a correct draft, else 0
    this.others = new Series(); // number of other requests in the pass that drew each token
    this.arrivals = new Series(); // arrival of each read since the request was sent, by the clock of this page
    this.counts = new Series(); // number of tokens at each of these arrivals
    this.final = null; // the event with the timings
    this.finish = null;
    this.elapsed = null;
    this.outcome = null; // complete, stopped or incomplete; null until it has ended
  }

  get tokens() {
    return this.times.length;
  }

  /** Adds the events of one read, `time` ms after the request was sent. */
  add(events, time) {
    for (const event of events) {
      const choice = event.choices?.[0];
      if (!choice) continue;
      let end = this.text.length;
      for (const [piece, ms, drafted, others] of choice.timeline ?? []) {
        end += piece.length;
        this.ends.push(end);
        this.times.push(ms);
        this.drafted.push(drafted);
        this.others.push(others);
      }
      this.#grow(choice.delta?.reasoning_content ?? "", choice.text ?? choice.delta.content ?? "");
      this.finish = choice.finish_reason ?? this.finish;
      if (event.timings) this.final = event;
    }
    if (this.tokens > (this.counts.last ?? 0)) {
      this.arrivals.push(time);
      this.counts.push(this.tokens);
    }
  }

  #grow(reasoning, content) {
    const start = this.text.length;
    if (reasoning) {
      if (this.thoughts.at(-1)?.[1] === start) this.thoughts.at(-1)[1] += reasoning.length;
      else this.thoughts.push([start, start + reasoning.length]);
    }
    this.text += reasoning + content;
  }

  get reasoning() {
    return this.thoughts.map(([start, end]) => this.text.slice(start, end)).join("");
  }

  get content() {
    const bounds = [0, ...this.thoughts.flat(), this.text.length];
    return bounds.map((bound, i) => (i % 2 ? "" : this.text.slice(bound, bounds[i + 1]))).join("");
  }

  /** Tokens per second after the first token, by the engine's clock: the server's figure after it has arrived. Null with fewer than two
   * tokens. */
  get rate() {
    if (this.final) return this.final.timings.predicted_per_second;
    const later = this.tokens - this.tokensAt(0); // tokens that arrived with the first one have no time
    return later ? (1000 * later) / (this.times.last - this.times.values[0]) : null;
  }

  /** Tokens per second after the first arrival, by the clock of this page. Null with fewer than two arrivals. */
  get clientRate() {
    const counts = this.counts.values;
    return counts.length > 1 ? (1000 * (this.counts.last - counts[0])) / (this.arrivals.last - this.arrivals.values[0]) : null;
  }

  /** Number of tokens that were correct drafts. */
  get right() {
    return this.drafted.values.reduce((sum, drafted) => sum + drafted, 0);
  }

  /** Speed by the number of other requests in a pass, for the tokens after the first arrival: [{others, tokens, rate}], sorted by others,
   * rate in tokens per second. Tokens that arrived together share the time since the previous arrival. */
  get rates() {
    const found = new Map();
    const [times, others] = [this.times.values, this.others.values];
    for (let start = this.tokensAt(0); start < times.length; ) {
      let end = start + 1;
      while (end < times.length && times[end] === times[start]) end++;
      const ms = (times[start] - times[start - 1]) / (end - start);
      for (; start < end; start++) {
        const at = found.get(others[start]) ?? { others: others[start], tokens: 0, ms: 0 };
        at.tokens++;
        at.ms += ms;
        found.set(others[start], at);
      }
    }
    const rated = Array.from(found.values(), ({ ms, ...at }) => ({ ...at, rate: ms ? (1000 * at.tokens) / ms : null }));
    return rated.sort((a, b) => a.others - b.others);
  }

  /** Number of tokens that had arrived `ms` after the first one, by the engine's clock. */
  tokensAt(ms) {
    const times = this.times.values;
    return firstAfter(times, times[0] + ms);
  }

  /** Length of the text up to a number of tokens. With the last token it includes the text that was held back. */
  lengthAt(tokens) {
    return tokens >= this.tokens ? this.text.length : tokens ? this.ends.values[tokens - 1] : 0;
  }

  /** Stretches [start, end, names] of a part of the text, in order. names: "draft" for correct drafts, "thought" for reasoning, both, or
   * "". */
  *stretches(from, to) {
    const [ends, drafted] = [this.ends.values, this.drafted.values];
    for (let token = firstAfter(ends, from); from < to; ) {
      const draft = drafted[token] === 1;
      let end = token < ends.length ? ends[token] : to;
      while (++token < ends.length && end < to && (drafted[token] === 1) === draft) end = ends[token];
      for (end = Math.min(end, to); from < end; ) {
        const [thought, until] = this.#thought(from);
        const next = Math.min(end, until);
        yield [from, next, [draft && "draft", thought && "thought"].filter(Boolean).join(" ")];
        from = next;
      }
    }
  }

  /** Whether a place is in the reasoning, and the next place where this changes. */
  #thought(place) {
    const next = this.thoughts.find(([, end]) => end > place);
    return !next ? [false, Infinity] : place < next[0] ? [false, next[0]] : [true, next[1]];
  }

  /** Times between arrivals at the engine's host, sorted. Tokens of one dispatch arrive together and count as one arrival. */
  get gaps() {
    const times = this.times.values;
    const gaps = new Float64Array(Math.max(0, times.length - 1));
    let n = 0;
    for (let i = 1; i < times.length; i++) if (times[i] > times[i - 1]) gaps[n++] = times[i] - times[i - 1];
    return gaps.subarray(0, n).sort();
  }

  /** The whole record, for a file. */
  toJSON() {
    const gaps = this.gaps;
    const list = (series) => Array.from(series.values);
    return {
      schema: "laneformer.playground/1",
      status: this.model.conditions.simulated ? "simulated" : "measured",
      date_utc: this.date.toISOString(),
      model: this.model.id,
      conditions: this.model.conditions,
      request: this.request,
      seed: this.final?.seed ?? this.request.body.seed ?? null,
      finish_reason: this.finish,
      complete: this.final !== null,
      text: this.text,
      timings: this.final?.timings ?? null,
      metrics: this.final?.metrics ?? null,
      tokens: {
        point: "engine_host",
        time_ms: list(this.times),
        end: list(this.ends),
        drafted: list(this.drafted),
        others: list(this.others),
      },
      between_arrivals_ms: gaps.length
        ? { point: "engine_host", n: gaps.length, p50: percentile(gaps, 50), p95: percentile(gaps, 95), p99: percentile(gaps, 99), max: gaps.at(-1) }
        : null,
      client: {
        point: "browser",
        user_agent: navigator.userAgent,
        arrival_ms: list(this.arrivals),
        tokens: list(this.counts),
        tokens_per_second: this.clientRate,
        elapsed_ms: this.elapsed,
      },
      notes: ["one request, measured in a browser; use `python -m infer bench` for figures to publish"],
    };
  }

  /** The data that `restored` needs, in compact form: numbers as differences, times in microseconds. It leaves out the messages of the
   * request and, if `brief`, the tokens. */
  saved(brief) {
    const { messages, ...body } = this.request.body;
    const { model, date, text, thoughts, final, finish, elapsed, outcome } = this;
    const series = brief ? null : SERIES.map(([name, unit]) => steps(this[name].values, unit));
    const { id, conditions } = model;
    const kept = final && { seed: final.seed, timings: final.timings, metrics: final.metrics };
    return { model: { id, conditions }, request: { ...this.request, body }, date, text, thoughts, final: kept, finish, elapsed, outcome, series };
  }

  static restored({ model, request, series, ...saved }, messages) {
    const made = new Recording(model, { ...request, body: messages ? { ...request.body, messages } : request.body });
    Object.assign(made, saved, { date: new Date(saved.date), outcome: saved.outcome ?? "incomplete" });
    SERIES.forEach(([name, unit], i) => {
      let sum = 0;
      for (const step of series?.[i] ?? []) made[name].push((sum += step) / unit);
    });
    made.elapsed ??= made.arrivals.last ?? 0; // for a run that the reload ended
    return made;
  }
}

const SERIES = [["ends", 1], ["times", US], ["drafted", 1], ["others", 1], ["arrivals", US], ["counts", 1]]; // [name, factor when saved]

function steps(values, unit) {
  return Array.from(values, (value, i) => Math.round(value * unit) - (i ? Math.round(values[i - 1] * unit) : 0));
}

/** Index of the first of the sorted values that is larger than `value`. */
function firstAfter(values, value) {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** A percentile of sorted values, interpolated linearly as by numpy.percentile. */
export function percentile(sorted, percent) {
  const place = ((sorted.length - 1) * percent) / 100;
  const below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
}
