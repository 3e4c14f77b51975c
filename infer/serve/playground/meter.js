// The figures on the page and their conditions.

import { samplingInWords } from "./form.js";
import { draw, figures, milliseconds } from "./histogram.js";
import { percentile } from "./recording.js";

const byId = (id) => document.getElementById(id);
const NONE = "–";

function put(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

/** Shows the conditions of a recording, or of the model alone before the first run. */
export function showConditions(current, recording) {
  const model = recording?.model ?? current;
  const facts = model.conditions ?? {};
  const seed = recording?.final?.seed ?? recording?.request.body.seed;
  const words = [
    facts.model ?? model.id,
    facts.parameters && `${millions(facts.parameters)} parameters`,
    facts.weights_dtype && `weights ${facts.weights_dtype}, compute ${facts.compute_dtype}`,
    facts.device && `${facts.devices} × ${facts.device}`,
    facts.backend && `backend ${facts.backend}${facts.threads ? `, ${facts.threads} thread${facts.threads > 1 ? "s" : ""}` : ""}`,
    `batch ${facts.batch_size ?? 1}`,
    recording?.final && promptInWords(recording.final.timings),
    recording?.final && draftsInWords(recording.final),
    recording?.final?.metrics.shared_passes > 0 && "shared with other requests",
    recording && samplingInWords(recording.request.body, seed),
  ];
  put("conditions", words.filter(Boolean).join(" · "));
  const marks = { CPU: facts.on_cpu, "random weights": facts.random_weights, simulated: facts.simulated };
  byId("marks").replaceChildren(
    ...Object.keys(marks).filter((mark) => marks[mark]).map((mark) => {
      const made = document.createElement("mark");
      made.textContent = mark;
      return made;
    }),
  );
}

function promptInWords({ prompt_n: computed, cache_n: cached }) {
  return `prompt ${computed + cached} tokens${cached ? `, ${cached} of them from the cache` : ""}`;
}

function draftsInWords({ timings, metrics: { speculative_decoding: found } }) {
  const words = `${timings.draft_n_accepted} of ${timings.draft_n} drafts accepted`;
  return found && `${found.tokens_per_pass.toFixed(2)} tokens per pass, ${words}`;
}

/** Shows the figures that change while tokens arrive. elapsed: ms since the start of the run. */
export function showProgress(recording, elapsed) {
  const { rate, clientRate } = recording;
  put("rate", rate === null ? NONE : figures(rate));
  byId("rate").classList.toggle("none", rate === null);
  put("client-rate", clientRate === null ? NONE : `${figures(clientRate)} tok/s`);
  put("count", recording.tokens.toLocaleString("en"));
  put("elapsed", `${(elapsed / 1000).toFixed(2)} s`);
  const first = recording.final?.metrics.time_to_first_token_ms ?? recording.times.values[0];
  put("first", milliseconds(first));
  put("drafted", recording.tokens ? share(recording.right / recording.tokens) : NONE);
  put("others", recording.tokens ? othersNow(recording) : NONE);
  const note = recording.final ? "sustained, measured by the server" : "so far, by the engine's clock";
  put("rate-note", recording.elapsed !== null && !recording.final ? "until the early end, by the engine's clock" : note);
}

/** Shows that there is no run yet. */
export function clear() {
  const names = ["rate", "client-rate", "count", "elapsed", "first", "drafted", "others", "prompt-n", "cache-n", "prompt-ms", "prompt-rate",
                 "queue-ms", "decode-n", "decode-ms", "mean-ms", "others-rates", "finish", "p50", "p95", "p99"];
  for (const name of names) put(name, NONE);
  byId("rate").classList.add("none");
  put("rate-note", "sustained, by the engine's clock");
  put("gaps-note", "");
  draw(byId("histogram"), [], {}, "Histogram: no run yet");
}

/** Shows prefill, decode and the distribution of times between tokens. */
export function showDetails(recording) {
  const { timings, metrics } = recording.final ?? {};
  put("prompt-n", timings ? tokens(timings.prompt_n) : NONE);
  put("cache-n", timings ? tokens(timings.cache_n) : NONE);
  put("prompt-ms", milliseconds(timings?.prompt_ms));
  put("prompt-rate", timings?.prompt_per_second ? `${figures(timings.prompt_per_second)} tok/s` : NONE);
  put("queue-ms", milliseconds(metrics?.queue_time_ms));
  put("decode-n", timings ? tokens(timings.predicted_n) : NONE);
  put("decode-ms", milliseconds(timings?.predicted_ms));
  put("mean-ms", milliseconds(metrics?.mean_itl_ms));
  put("others-rates", recording.tokens ? costOfOthers(recording) || others(0) : NONE);
  put("finish", { length: "length limit", stop: "the model" }[recording.finish] ?? NONE);
  const gaps = recording.gaps;
  const marks = gaps.length ? { p50: percentile(gaps, 50), p95: percentile(gaps, 95), p99: percentile(gaps, 99) } : {};
  for (const name of ["p50", "p95", "p99"]) put(name, milliseconds(marks[name]));
  const each = gaps.length ? (recording.tokens - 1) / gaps.length : 1;
  put("gaps-title", each > 1.005 ? "Time between arrivals" : "Time between tokens");
  const detail = each > 1.005 ? `, ${figures(each)} tokens each` : "";
  put("gaps-note", gaps.length ? `${gaps.length.toLocaleString("en")} at the engine's host${detail}` : "");
  const words = Object.entries(marks).map(([name, value]) => `${name} ${milliseconds(value)}`);
  draw(byId("histogram"), gaps, marks, `Histogram of ${gaps.length} times: ${words.join(", ")}`);
}

/** The figures for the line below an answer: pairs of name and value. */
export function summary(recording) {
  const { final, rate } = recording;
  const first = final?.metrics.time_to_first_token_ms ?? recording.times.values[0];
  const { prompt_n: computed, cache_n: cached } = final?.timings ?? {};
  const drafts = recording.right;
  return [
    ["first token", first !== undefined && first !== null && milliseconds(first)],
    ["prompt", final && `${tokens(computed + cached)} tokens, ${tokens(cached)} cached`],
    ["answer", `${tokens(recording.tokens)} tokens${rate === null ? "" : `, ${figures(rate)} tok/s`}`],
    ["drafted", drafts > 0 && share(drafts / recording.tokens)],
    ["other requests", costOfOthers(recording)],
  ].filter(([, value]) => value);
}

/** The number of other requests in the newest pass while the answer grows; at its end, the share of tokens from shared passes. */
function othersNow(recording) {
  if (recording.outcome === null) return others(recording.others.last);
  const all = recording.others.values;
  const shared = all.filter((count) => count > 0).length;
  return shared ? `for ${share(shared / all.length)} of tokens` : others(0);
}

const others = (count) => (count ? `${count}` : "none");

/** The speeds alone and with other requests; "" if no pass was shared. */
function costOfOthers({ rates }) {
  const rated = rates.filter(({ rate }) => rate !== null);
  return !rates.at(-1)?.others ? "" : rated.map(({ others: count, rate }) => `${count ? `with ${count}` : "alone"} ${figures(rate)} tok/s`).join(", ");
}

function share(part) {
  return `${Math.round(100 * part)} %`;
}

function tokens(count) {
  return count.toLocaleString("en");
}

function millions(count) {
  return count >= 1e9 ? `${figures(count / 1e9)}B` : count >= 1e6 ? `${figures(count / 1e6)}M` : count.toLocaleString("en");
}
