// A chart of the last hour at full size, in a dialog: uPlot, which is loaded when the first one is opened.

import { h, openDialog, table } from "./dom.js";

const RANGES = [[300, "5 min"], [900, "15 min"], [3600, "1 h"]];

let loading = null;

function library() {
  loading ??= new Promise((resolve, reject) => {
    const link = h("link", { rel: "stylesheet", href: new URL("./vendor/uplot.css", import.meta.url).href });
    link.addEventListener("error", reject);
    link.addEventListener("load", () => import("./vendor/uplot.js").then((module) => resolve(module.default), reject));
    document.head.append(link);
  }).catch((error) => {
    loading = null; // the next one tries again
    throw error;
  });
  return loading;
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

/** Means of each minute, newest first. */
function minutes(times, lists) {
  const found = new Map();
  times.forEach((time, k) => {
    const minute = Math.floor(time / 60) * 60;
    if (!found.has(minute)) found.set(minute, lists.map(() => []));
    lists.forEach((list, n) => list[k] !== null && found.get(minute)[n].push(list[k]));
  });
  return [...found].reverse().map(([minute, values]) => [minute, ...values.map(mean)]);
}

/**
 * Opens it. `view`: title, names of the series, format (of a value); `data()`: {times, lists} as they are now.
 * Returns {box, update}: the chart follows when `update` is called, and does nothing once the dialog is closed.
 */
export function openChart(view, data, closed) {
  const place = h("div", { class: "chart", role: "img", "aria-label": `${view.title}; the table below says the same` });
  const rows = h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Means of each minute" });
  const details = h("details", { ontoggle: () => tabulate() }, h("summary", {}, "As a table: means of each minute"), rows);
  const buttons = RANGES.map(([seconds, name]) =>
    h("button", { type: "button", "aria-pressed": String(seconds === 3600), onclick: (event) => range(seconds, event.target) }, name));
  let chart = null;
  let shown = 3600;
  const observer = new ResizeObserver(() => chart?.setSize(size()));
  const box = openDialog(view.title, h("div", {},
    h("div", { class: "toolbar", role: "group", "aria-label": "Stretch of time" }, buttons,
      h("span", { class: "muted" }, "Drag over the chart to look closer; a double click shows all of it.")),
    place, details), {
    wide: true,
    closed: () => {
      observer.disconnect();
      chart?.destroy();
      chart = null;
      closed();
    },
  });

  const size = () => ({ width: Math.max(place.clientWidth, 200), height: 320 });
  const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function series() {
    const { times, lists } = data();
    return [times, ...lists];
  }

  function range(seconds, button) {
    shown = seconds;
    for (const each of buttons) each.setAttribute("aria-pressed", String(each === button));
    follow();
  }

  function follow() {
    const { times } = data();
    const end = times.at(-1) ?? 0;
    chart?.setScale("x", { min: end - shown, max: end });
  }

  function tabulate() {
    if (!details.open) return;
    const { times, lists } = data();
    const clock = (time) => new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    rows.replaceChildren(table(view.title, [["Time", ""], ...view.names.map((name) => [name, "number"])],
      minutes(times, lists).map(([time, ...values]) => [clock(time), ...values.map(view.format)])));
  }

  function update() {
    if (!chart) return;
    const zoomed = Math.abs(chart.scales.x.max - chart.data[0].at(-1)) > 1;
    chart.setData(series(), false);
    if (zoomed) chart.redraw();
    else follow();
  }

  async function draw() {
    let Plot;
    try {
      Plot = await library();
    } catch {
      place.replaceChildren(h("p", { class: "error" }, "The chart could not be loaded; the table has the same figures."));
      return;
    }
    if (!box.isConnected) return; // closed meanwhile
    const axis = { stroke: token("--muted"), grid: { stroke: token("--line"), width: 1 }, ticks: { stroke: token("--line"), width: 1 } };
    const strokes = [token("--accent"), token("--warn"), token("--ok"), token("--bad"), token("--muted")];
    chart = new Plot({
      ...size(),
      scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
      axes: [axis, { ...axis, size: 90, values: (_, splits) => splits.map((value) => (value === null ? "" : view.format(value))) }],
      series: [{ value: (_, time) => (time === null ? "" : new Date(time * 1000).toLocaleTimeString()) },
        ...view.names.map((label, n) => ({
          label, stroke: strokes[n % strokes.length], width: 1.5, dash: n % 2 ? [6, 3] : undefined, points: { show: false },
          spanGaps: false, value: (_, value) => view.format(value),
        }))],
    }, series(), place);
    follow();
    observer.observe(place);
  }

  draw();
  return { box, update };
}
