// What a reload of the tab keeps: in sessionStorage, which no other tab reads and which ends with the tab. The key is never in it.

const name = () => `laneformer.playground ${location.pathname}`;

/** What was saved last, or null. */
export function load() {
  try {
    return JSON.parse(sessionStorage.getItem(name()));
  } catch {
    return null;
  }
}

/** Saves data(brief), a brief one if the whole one has no room; returns whether any was saved. */
export function save(data) {
  for (const brief of [false, true]) {
    try {
      sessionStorage.setItem(name(), JSON.stringify(data(brief)));
      return true;
    } catch {
      // no room, or storage is not allowed
    }
  }
  return false;
}
