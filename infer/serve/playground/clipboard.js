// Copies to the clipboard, and downloads.

const COPIED_MS = 1200;
const KEPT_MS = 1000; // time for a download to begin

/** Copies a text, and shows on the button whether this worked. */
export async function copy(button, text, announce) {
  const [name, done] = [button.textContent, await copied(text)];
  button.textContent = done ? "Copied" : "Not copied";
  announce(button.textContent);
  setTimeout(() => (button.textContent = name), COPIED_MS);
}

/** Copies a text; returns whether this worked. Browsers allow the clipboard only for HTTPS and localhost; elsewhere execCommand is used. */
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

/** Downloads a recording as a JSON file. */
export function download(recording) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(recording, null, 1)], { type: "application/json" }));
  link.download = `laneformer-${recording.date.toISOString().slice(0, 19).replaceAll(":", "")}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), KEPT_MS);
}
