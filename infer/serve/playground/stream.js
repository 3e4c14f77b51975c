// Requests to the server, its streams, and its errors in plain words.

/** An error that the server answered with; status 0 if there was no answer. */
export class Problem extends Error {
  constructor(status, error = {}, retryAfter = null) {
    super(error.message ?? `HTTP status ${status}`);
    this.status = status;
    this.code = error.code;
    this.param = error.param;
    this.retryAfter = retryAfter;
  }
}

/** fetch() from the server of this page, with a path relative to that of the page. Throws Problem. */
export async function ask(path, key, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), { cache: "no-store", ...options, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Problem(0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  throw new Problem(response.status, body.error, response.headers.get("Retry-After"));
}

/** The events of a stream, in one array per read: the text after "data: ", and comments unchanged. */
export async function* batches(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Problem(0, { message: "the connection was lost" });
    });
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    if (events.length) yield events.map((event) => (event.startsWith("data: ") ? event.slice(6) : event));
  }
}

/** Sends a request for a stream. onEvents: called with the parsed events of each read. onQueued: called with the number of requests before
 * this one. Throws Problem. */
export async function stream(request, key, signal, onEvents, onQueued) {
  const headers = { "Content-Type": "application/json" };
  const response = await ask(request.path, key, { method: "POST", headers, body: JSON.stringify(request.body), signal });
  let complete = false;
  for await (const batch of batches(response)) {
    const events = [];
    for (const text of batch) {
      const queued = /^: queued (\d+)/.exec(text);
      if (queued) onQueued(Number(queued[1]));
      else if (text === "[DONE]") complete = true;
      else if (!text.startsWith(":")) events.push(JSON.parse(text));
    }
    if (events.length) onEvents(events);
    const failed = events.find((event) => event.error);
    if (failed) throw new Problem(500, failed.error);
  }
  if (!complete) throw new Problem(0, { message: "the connection was lost" });
}

/** Two sentences for the user: the problem and its remedy. */
export function explain(problem) {
  const { status, code, message } = problem;
  if (!(problem instanceof Problem)) return ["This page failed.", `Reload it and try again. (${problem})`];
  if (status === 0) return ["The server cannot be reached.", "Check in its terminal whether it is running; if not, start it again. Then try again."];
  if (status === 401) return ["The server refused the key.", "Enter the key that it was started with."];
  if (status === 403) return ["The server does not accept this host name.", sentence(message)];
  if (code === "model_not_found") return ["The server has a different model now.", "Reload this page."];
  if (status === 413) return ["The prompt is too long for one request.", "Shorten it."];
  if (status === 429) {
    return ["The queue is full.", `${sentence(message)} Try again in ${problem.retryAfter ?? "a few"} s or more.`];
  }
  if (code === "timeout") return ["The answer took too long.", `${sentence(message)} Ask for fewer tokens, or start the server with a larger --timeout.`];
  if (code === "context_length_exceeded") return ["The prompt does not fit.", sentence(message)];
  if (message.includes("shutting down")) return ["The server was stopped.", "Start it again, then try again."];
  if (status === 503) return ["The engine is not ready.", sentence(message)];
  if (status >= 500) return ["The engine failed.", `${sentence(message)} Try again; the server's terminal may show the cause.`];
  return ["The server refused the request.", `${sentence(message)} Change that, then try again.`];
}

function sentence(message) {
  return `${message[0].toUpperCase()}${message.slice(1)}${/[.!?]$/.test(message) ? "" : "."}`;
}
