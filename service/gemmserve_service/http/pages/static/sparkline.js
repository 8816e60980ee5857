// Small charts of the last hour, as SVG: a line for each series, gaps where nothing happened.

import { svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 48;

/** Largest value of several lists, at least `least`; nulls are nothing. */
export const largest = (lists, least = 0) =>
  lists.reduce((most, list) => list.reduce((m, value) => (value !== null && value > m ? value : m), most), least);

/** Values of `list`, `most` at most: of each stretch the largest one, so that no peak is lost; null where all are. */
export function thinned(list, most) {
  const step = Math.ceil(list.length / most);
  if (step <= 1) return list;
  const out = [];
  for (let end = list.length; end > 0; end -= step) {
    let found = null;
    for (let k = Math.max(end - step, 0); k < end; k += 1) {
      if (list[k] !== null && (found === null || list[k] > found)) found = list[k];
    }
    out.push(found);
  }
  return out.reverse();
}

/** The `d` of a path through the values, which it fits into the picture; a lone value is a short stroke. */
export function path(values, most, width = WIDTH, height = HEIGHT) {
  const step = width / Math.max(values.length - 1, 1);
  const place = (k) => [k * step, height - 1 - (Math.min(values[k] / (most || 1), 1) * (height - 2))];
  let d = "";
  values.forEach((value, k) => {
    if (value === null) return;
    const [x, y] = place(k).map((part) => part.toFixed(1));
    const begins = k === 0 || values[k - 1] === null;
    d += `${begins ? "M" : "L"}${x} ${y}`;
    if (begins && (k + 1 >= values.length || values[k + 1] === null)) d += `h${(step / 2 || 1).toFixed(1)}`;
  });
  return d;
}

/** The chart, to be seen beside figures in words; its top is at least at `least`. The first series is drawn last, on top. */
export function sparkline(lists, least = 0) {
  const series = lists.map((list) => thinned(list, WIDTH / 2));
  const most = largest(series, least);
  const lines = series.map((values, index) => svg("path", { class: `line line-${index}`, d: path(values, most) }));
  const area = series.length === 1 && series[0].every((value) => value !== null) && series[0].length > 1;
  return svg("svg", {
    class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true",
  },
    svg("path", { class: "base", d: `M0 ${HEIGHT - 0.5}H${WIDTH}` }),
    area && svg("path", { class: "area", d: `${path(series[0], most)}V${HEIGHT}H0Z` }),
    lines.reverse());
}
