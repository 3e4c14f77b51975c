// The request that the form describes, as an object and as a command.

const form = document.getElementById("request");
const NUMBERS = ["max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

export const isChat = () => form.elements.mode.value === "chat";

/** A request with the settings in the form. The server chooses the values of empty fields. turn, key: of a conversation; without them, the
 * request is a completion of the prompt. */
export function readRequest(model, turn, key) {
  const asked = turn ? { messages: turn.messages, prompt_cache_key: key } : { prompt: form.elements.prompt.value };
  const body = { model: model.id, ...asked };
  for (const name of NUMBERS) {
    const value = form.elements[name].valueAsNumber;
    if (!Number.isNaN(value)) body[name] = value;
  }
  return { path: turn ? "v1/chat/completions" : "v1/completions", body: { ...body, stream: true, return_timeline: true } };
}

/** The settings in the form as data; `writeSettings` is the inverse. */
export const readSettings = () => Object.fromEntries(NUMBERS.map((name) => [name, form.elements[name].value]));

export function writeSettings(settings) {
  for (const name of NUMBERS) if (typeof settings?.[name] === "string") form.elements[name].value = settings[name];
}

/** The request as a command for a POSIX shell. The key is read from a variable and never shown. */
export function asCurl({ path, body }, seed, withKey) {
  const { return_timeline, prompt_cache_key, ...plain } = body;
  const data = JSON.stringify(seed === undefined ? plain : { ...plain, seed }).replaceAll("'", "'\\''");
  const key = withKey ? ' \\\n  -H "Authorization: Bearer $LANEFORMER_API_KEY"' : "";
  return `curl -N ${new URL(path, document.baseURI)} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${data}'`;
}

/** The sampling settings of a request in words. */
export function samplingInWords(body, seed) {
  const { temperature = 1, top_p, top_k, min_p, repetition_penalty } = body;
  const given = Object.entries({ top_p, top_k, min_p, repetition_penalty }).filter(([, value]) => value !== undefined);
  const rest = given.map(([name, value]) => `${name} ${value}`);
  if (temperature === 0) return ["greedy", ...rest.filter((words) => words.startsWith("repetition"))].join(", ");
  return [`temperature ${temperature}`, ...rest, ...(seed === undefined ? [] : [`seed ${seed}`])].join(", ");
}
