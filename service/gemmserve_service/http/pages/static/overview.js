// The overview (GET /v1/overview) as elements: state, devices, queue, memory, failures, and tiles of the last hour.

import { gauge, h, moment, pill, table } from "./dom.js";
import { ago, bytes, count, percent, seconds, si } from "./format.js";
import { largest, sparkline } from "./sparkline.js";

const PILLS = { ready: "ok", starting: "warn", draining: "warn" };

const rate = (format) => (value) => `${format(value)}/s`;
const flops = (value) => si(value, "FLOP/s");
const percentOf = (part, whole) => (part === null || !whole ? null : part / whole);

const jobLink = (id, text) => h("a", { href: `#${id}` }, text);

/** State, and what to do where it is not ready. */
export function stateOf({ state, ready, reasons, version, started, time, devices }) {
  const facts = [
    `version ${version}`,
    `up ${seconds(Math.floor(time - started))}`,
    `${devices.length} ${devices.length === 1 ? "device" : "devices"}`,
  ];
  return [
    h("h1", {}, "Server ", pill(state, ready ? "ok" : state === "draining" ? "warn" : "bad")),
    h("p", { class: "muted" }, facts.join(" · ")),
    reasons.length > 0 && h("ul", { class: "reasons" }, reasons.map(({ reason, remedy }) =>
      h("li", {}, h("strong", {}, reason), ": ", marked(remedy)))),
  ].filter(Boolean);
}

/** State of a server that does not answer; `heard`: when it last did, Unix seconds, or null where nothing is shown of it. */
export function unreachable(heard) {
  const since = heard === null ? "" : ` What is shown is as it was at ${new Date(heard * 1000).toLocaleTimeString()}.`;
  return [
    h("h1", {}, "Server ", pill("not reachable", "bad")),
    h("p", { class: "muted" }, `No answer came; it is asked again.${since}`),
  ];
}

/** A figure above its bar. */
function measure(text, share, label, level = "") {
  return h("div", { class: "measure" }, h("span", {}, text), share === null ? "" : gauge(share, label, level));
}

function memoryCell(device) {
  const share = percentOf(device.memory_used_bytes, device.memory_bytes);
  const text = `${bytes(device.memory_used_bytes)} of ${bytes(device.memory_bytes)}`;
  return measure(text, share, `memory ${percent(share)} used`, share > 0.95 ? "high" : "");
}

function powerCell(device) {
  const share = percentOf(device.power_watts, device.power_limit_watts);
  if (device.power_watts === null) return "–";
  return measure(`${Math.round(device.power_watts)} W`, share, `power ${percent(share)} of the limit`, share > 0.97 ? "high" : "");
}

function temperatureCell(device) {
  const value = device.temperature_celsius;
  // 90 °C is about where devices begin to slow down.
  return value === null ? "–" : measure(`${Math.round(value)} °C`, value / 100, `${Math.round(value)} degrees`, value >= 85 ? "high" : "");
}

function runningCell(device, now) {
  if (!device.running.length) return h("span", { class: "muted" }, "idle");
  return h("ul", { class: "plain" }, device.running.map((task) => h("li", {},
    task.id ? jobLink(task.id, task.what) : task.what ?? "another owner's",
    h("span", { class: "muted" }, ` ${seconds(Math.max(now - task.since, 0))}${task.owner ? `, ${task.owner}` : ""}`))));
}

/** Table of devices. */
export function devicesOf({ devices, time }) {
  const columns = ["Device", "State", "Memory", "Busy", "Power", "Temperature", "Running"].map((name) => [name, ""]);
  return table("Devices: memory, load and what runs on them", columns, devices.map((device) => [
    h("div", {}, device.name, device.name !== device.id && h("div", { class: "muted" }, device.id)),
    h("div", {}, pill(device.state, PILLS[device.state] ?? "bad"),
      device.health.length > 0 && h("ul", { class: "plain health" }, device.health.map((line) => h("li", {}, line)))),
    memoryCell(device),
    device.utilisation === null ? "–" : measure(percent(device.utilisation), device.utilisation, `busy ${percent(device.utilisation)}`),
    powerCell(device),
    temperatureCell(device),
    runningCell(device, time),
  ]));
}

/** Table of the queue by owner; `keys`: whether there are any, so that owners have names. */
export function queueOf({ queue, time }, keys) {
  if (!queue.length) return h("p", { class: "muted" }, "Nothing waits, nothing runs.");
  const columns = [["Owner", ""], ["Queued", "number"], ["Running", "number"], ["Oldest", "number"]];
  return table("Jobs by owner", columns, queue.map((each) => [
    each.owner ?? h("span", { class: "muted" }, keys ? "others" : "everybody"),
    count(each.queued), count(each.running), each.oldest === null ? "–" : seconds(Math.max(time - each.oldest, 0)),
  ]));
}

/** Memory that the server keeps, and how often an operand was there already. */
export function memoryOf({ memory }) {
  const rows = [
    ["On devices", memory.resident, "operands and results that are on a device"],
    ["In memory", memory.arena, "results that are not in files yet"],
    ["Stored", memory.store, "arrays in files"],
    ["In the tier", memory.tier, "arrays in the tier below, whether in files too or not"],
  ].filter(([, place]) => place);
  const columns = [["Where", ""], ["Held", ""], ["Found there", "number"]];
  return table("What the server keeps", columns, rows.map(([name, place, meaning]) => {
    const share = percentOf(place.bytes, place.limit);
    const asked = (place.hits ?? 0) + (place.misses ?? 0);
    const text = place.limit ? `${bytes(place.bytes)} of ${bytes(place.limit)}` : bytes(place.bytes);
    return [
      h("div", {}, name, h("div", { class: "muted" }, meaning)),
      measure(text, share, `${name}: ${percent(share)} used`, share > 0.95 ? "high" : ""),
      asked ? h("span", { title: `${count(place.hits)} found, ${count(place.misses)} loaded` }, percent(place.hits / asked)) : "–",
    ];
  }));
}

/** Text with `code` in it. */
const marked = (text) => text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));

/** Table of the last failures: the problem, and what to do about it. */
export function failuresOf({ failures, time }) {
  if (!failures.length) return h("p", { class: "muted" }, "None since the server started.");
  const columns = [["When", "word"], ["What", "word"], ["Problem", ""], ["What to do", ""]];
  return table("Last failures, newest first", columns, failures.map((each) => [
    moment(each.time, ago(each.time, time)),
    h("div", {}, each.job ? jobLink(each.job, each.kind) : each.kind, each.owner ? h("div", { class: "muted" }, each.owner) : ""),
    h("div", {}, h("strong", {}, each.problem.title), each.problem.detail ? `: ${each.problem.detail}` : ""),
    marked(each.remedy),
  ]));
}

/** Tiles of the last hour: which series, how a value is written, and up to what the chart reaches at least. */
export const VIEWS = [
  { id: "products", title: "Products", series: ["products"], names: ["products"], format: rate((value) => si(value)) },
  { id: "flops", title: "Arithmetic", series: ["flops"], names: ["FLOP/s"], format: flops },
  { id: "bytes", title: "Transfer", series: ["bytes_in", "bytes_out"], names: ["in", "out"], format: rate(bytes) },
  { id: "utilisation", title: "Devices busy", series: ["utilisation"], names: [], format: percent, least: 1 },
  { id: "total", title: "Time of a product", series: ["total_p50", "total_p99"], names: ["p50", "p99"], format: seconds },
  { id: "queued", title: "Time in the queue", series: ["queued_p50", "queued_p99"], names: ["p50", "p99"], format: seconds },
  { id: "computing", title: "Time computing", series: ["computing_p50", "computing_p99"], names: ["p50", "p99"], format: seconds },
];

/** The view's lists of values and the names of its series; `utilisation` has one for each device. */
export function listsOf(view, history) {
  if (view.id !== "utilisation") return { lists: view.series.map((name) => history.series[name] ?? []), names: view.names };
  const lists = history.series.utilisation ?? [];
  return { lists, names: lists.map((_, index) => `device ${index}`) };
}

/** Times of a history's points, Unix seconds. */
export function timesOf(history) {
  const length = Math.max(0, ...Object.values(history.series).map((list) => (Array.isArray(list[0]) ? list[0].length : list.length)));
  return Array.from({ length }, (_, k) => history.end - (length - 1 - k) * history.step);
}

/** The newest value of a list within its last minute, or null: a point may have come in which nothing ended. */
const latest = (list) => list.slice(-12).findLast((value) => value !== null) ?? null;

/** One tile; it is a link that opens the chart (`#chart-products`). */
export function tileOf(view, history) {
  const { lists, names } = listsOf(view, history);
  const told = lists.map((list) => list.some((value) => value !== null));
  if (!told.some(Boolean)) {
    return h("div", { class: "tile" }, h("h3", {}, view.title), h("p", { class: "muted" }, "No figures yet."));
  }
  const now = lists.map((list) => view.format(latest(list)));
  return h("a", { class: "tile", href: `#chart-${view.id}` },
    h("h3", {}, view.title),
    lists.length === 1
      ? h("p", { class: "now" }, now[0])
      : h("p", { class: "now several" }, now.slice(0, 2).map((value, index) => h("span", {}, h("small", {}, names[index]), ` ${value}`)),
        now.length > 2 ? h("small", {}, `and ${now.length - 2} more`) : null),
    sparkline(lists, view.least),
    h("p", { class: "muted most" }, `at most ${view.format(largest(lists))}`));
}

/** Appends a point of the stream to a history; it keeps `most` of them. */
export function append(history, point, most = 720) {
  const push = (list, value) => {
    list.push(value ?? null);
    if (list.length > most) list.splice(0, list.length - most);
  };
  for (const [name, value] of Object.entries(point.series)) {
    const list = (history.series[name] ??= []);
    if (Array.isArray(value)) value.forEach((each, index) => push((list[index] ??= []), each));
    else push(list, value);
  }
  history.end = point.time;
}
