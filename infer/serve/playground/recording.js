// One answer as received: its text, the end of each token in it, and arrival times by the engine's clock and by this page's.

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
  /** model: as /v1/models reports it. request: path and body. Times are in milliseconds. */
  constructor(model, request) {
    this.model = model;
    this.request = request;
    this.date = new Date();
    this.text = "";
    this.ends = new Series(); // end of each token in the text
    this.times = new Series(); // arrival of each token since the engine started the request, by the engine's clock
    this.arrivals = new Series(); // arrival of each read since the request was sent, by this page's clock
    this.counts = new Series(); // number of tokens at each of these arrivals
    this.final = null; // the event with the timings
    this.finish = null;
    this.elapsed = null;
  }

  get tokens() {
    return this.times.length;
  }

  /** Adds the events of one read, `time` ms after the request was sent. */
  add(events, time) {
    for (const event of events) {
      const choice = event.choices?.[0];
      if (!choice) continue;
      const text = choice.text ?? (choice.delta.reasoning_content ?? "") + (choice.delta.content ?? "");
      let end = this.text.length;
      for (const [piece, ms] of choice.timeline ?? []) {
        end += piece.length;
        this.ends.push(end);
        this.times.push(ms);
      }
      this.text += text;
      this.finish = choice.finish_reason ?? this.finish;
      if (event.timings) this.final = event;
    }
    if (this.tokens > (this.counts.last ?? 0)) {
      this.arrivals.push(time);
      this.counts.push(this.tokens);
    }
  }

  /** Tokens per second after the first by the engine's clock; the server's figure once it is in. Null with fewer than two tokens. */
  get rate() {
    if (this.final) return this.final.timings.predicted_per_second;
    const later = this.tokens - this.tokensAt(0); // tokens that arrived with the first one have no time
    return later ? (1000 * later) / (this.times.last - this.times.values[0]) : null;
  }

  /** The same by this page's clock, over the tokens after the first arrival. */
  get clientRate() {
    const counts = this.counts.values;
    return counts.length > 1 ? (1000 * (this.counts.last - counts[0])) / (this.arrivals.last - this.arrivals.values[0]) : null;
  }

  /** Number of tokens that had arrived `ms` after the first one, by the engine's clock. */
  tokensAt(ms) {
    const times = this.times.values;
    let low = 0;
    let high = times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] - times[0] <= ms) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** The text up to a number of tokens. The last one includes what was held back. */
  upTo(tokens) {
    return tokens >= this.tokens ? this.text : this.text.slice(0, tokens ? this.ends.values[tokens - 1] : 0);
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
      tokens: { point: "engine_host", time_ms: list(this.times), end: list(this.ends) },
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
}

/** A percentile of sorted values, interpolated linearly as numpy's. */
export function percentile(sorted, percent) {
  const place = ((sorted.length - 1) * percent) / 100;
  const below = Math.floor(place);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (place - below) * (sorted[above] - sorted[below]);
}
