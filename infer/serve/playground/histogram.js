// A histogram with marks, drawn as SVG.

import { percentile } from "./recording.js";

const WIDTH = 400;
const HEIGHT = 92;
const FLOOR = 74; // y of the base line
const BINS = 50;

/** Counts of sorted values in bins of equal width. The first and the last bin include the values beyond them. */
export function bins(sorted) {
  const middle = percentile(sorted, 99) - percentile(sorted, 1);
  const margin = Math.max(middle * 0.15, sorted.at(-1) * 1e-3, 1e-3);
  const low = Math.max(0, percentile(sorted, 1) - margin);
  const high = percentile(sorted, 99) + margin;
  const counts = new Array(BINS).fill(0);
  for (const value of sorted) {
    const bin = Math.floor(((value - low) / (high - low)) * BINS);
    counts[Math.min(BINS - 1, Math.max(0, bin))]++;
  }
  return { counts, low, high };
}

/** Draws sorted times in ms. marks: {name: value}. label: for screen readers. */
export function draw(svg, sorted, marks, label) {
  svg.replaceChildren();
  svg.setAttribute("aria-label", label);
  if (!sorted.length) return;
  const { counts, low, high } = bins(sorted);
  const most = Math.max(...counts);
  const step = WIDTH / BINS;
  counts.forEach((count, i) => {
    if (!count) return;
    const height = Math.max(1.5, ((FLOOR - 4) * count) / most);
    const bar = add(svg, "rect", { x: i * step + 0.75, y: FLOOR - height, width: step - 1.5, height, rx: 1 });
    const [first, last] = [i === 0, i === BINS - 1];
    const from = first ? sorted[0] : low + (i * (high - low)) / BINS;
    const to = last ? Math.max(sorted.at(-1), high) : low + ((i + 1) * (high - low)) / BINS;
    add(bar, "title", {}, `${count} of ${sorted.length}: ${milliseconds(from)} to ${milliseconds(to)}`);
    bar.dataset.count = count;
  });
  add(svg, "line", { x1: 0, x2: WIDTH, y1: FLOOR + 0.5, y2: FLOOR + 0.5, class: "axis" });
  for (const [name, value] of Object.entries(marks)) {
    const x = (WIDTH * (Math.min(value, high) - low)) / (high - low);
    add(svg, "line", { x1: x, x2: x, y1: 0, y2: FLOOR, class: name });
  }
  add(svg, "text", { x: 0, y: HEIGHT - 3 }, milliseconds(low));
  add(svg, "text", { x: WIDTH / 2, y: HEIGHT - 3, "text-anchor": "middle" }, milliseconds((low + high) / 2));
  const beyond = sorted.at(-1) > high ? `${milliseconds(high)} … ${milliseconds(sorted.at(-1))}` : milliseconds(high);
  add(svg, "text", { x: WIDTH, y: HEIGHT - 3, "text-anchor": "end" }, beyond);
}

/** A time with three significant digits. */
export function milliseconds(ms) {
  return ms === null || ms === undefined ? "–" : ms >= 10_000 ? `${figures(ms / 1000)} s` : `${figures(ms)} ms`;
}

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const THREE = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export function figures(value) {
  return (value >= 100 ? WHOLE : THREE).format(value);
}

function add(parent, name, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  parent.append(element);
  return element;
}
