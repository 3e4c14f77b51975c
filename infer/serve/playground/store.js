// Stores the state that a reload of the tab keeps, in sessionStorage: other tabs cannot read it, and it ends with the tab. The key is never
// stored.

const name = () => `laneformer.playground ${location.pathname}`;

/** The data that was saved last, or null. */
export function load() {
  try {
    return JSON.parse(sessionStorage.getItem(name()));
  } catch {
    return null;
  }
}

/** Saves data(false), or data(true), which is smaller, if there is no room. Returns whether any data was saved. */
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
