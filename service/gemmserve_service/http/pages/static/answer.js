// Answers of the server for people: status, time, header fields, and the body by its media type.

import { h, problemText } from "./dom.js";
import { bytes, seconds, shape } from "./format.js";
import { firstMatrix, NpyError, parse } from "./npy.js";
import { root } from "./session.js";

const MOST_TEXT = 200_000; // characters: more would take a browser seconds to lay out
const MOST_ELEMENTS = 8; // a row, a column

/** Place of one answer after the other; `name` is that of the operation. */
export class Answer {
  constructor(name) {
    this.name = name;
    this.line = h("p", { role: "status" });
    this.rest = h("div");
    this.element = h("div", { class: "answer", hidden: true }, this.line, this.rest);
    this.urls = []; // of what can be saved, for the browser to forget
  }

  /** Says that the request is on its way. */
  wait(request) {
    for (const url of this.urls.splice(0)) URL.revokeObjectURL(url);
    this.element.hidden = false;
    this.line.replaceChildren(h("code", {}, request), " …");
    this.rest.replaceChildren();
  }

  /** Says that there is none. */
  fail(error) {
    this.line.replaceChildren(error.name === "AbortError" ? "Stopped." : "");
    if (error.name === "AbortError") return;
    this.rest.append(problemText({ title: "No whole answer came", detail: error.message }, root));
  }

  /** Shows the answer to a request that left at `began`; resolves with the text of the body, "" of a binary one. */
  async show(response, method, began) {
    const { status, statusText, headers } = response;
    const level = status < 300 ? "ok" : status < 500 ? "warn" : "bad";
    const size = h("span");
    const passed = () => ` in ${seconds((performance.now() - began) / 1000)}`;
    const time = h("span", {}, passed());
    this.line.replaceChildren(h("b", { class: `pill ${level}` }, `${status} ${statusText}`), time, size);
    const rows = [...headers].map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value)));
    const fields = h("details", {}, h("summary", {}, "Header fields"), h("table", {}, h("tbody", {}, rows)));
    const body = h("div");
    this.rest.replaceChildren(body, fields);
    const kind = (headers.get("content-type") ?? "").split(";")[0].trim();
    if (kind === "text/event-stream") return streamed(response, body, `Events of ${this.name}`);
    const blob = method === "HEAD" ? new Blob() : await response.blob();
    time.textContent = passed();
    if (!blob.size) {
      body.replaceChildren(h("p", { class: "muted" }, "No body."));
      return "";
    }
    size.textContent = `, ${bytes(blob.size)}`;
    return this.#fill(body, kind, blob, headers);
  }

  async #fill(body, kind, blob, headers) {
    if (kind === "application/x-npy" || kind === "application/x-npz") {
      const buffer = await blob.arrayBuffer();
      const arrays = kind === "application/x-npy" ? [["", buffer]] : members(buffer);
      const texts = arrays.map(([name, file]) => arrayText(name, file, `Elements of the answer of ${this.name}`));
      body.append(...texts, this.#save(blob, headers, kind));
      return "";
    }
    if (!kind.endsWith("json") && !kind.startsWith("text/")) {
      body.append(this.#save(blob, headers, kind));
      return "";
    }
    const text = await blob.text();
    if (kind === "application/problem+json") body.append(problemText(JSON.parse(text), root));
    const pretty = kind.endsWith("json") ? indented(text) : text;
    body.append(h("pre", region(`Answer of ${this.name}`), pretty.slice(0, MOST_TEXT)));
    if (pretty.length > MOST_TEXT) body.append(h("p", {}, "Only the beginning is shown. "), this.#save(blob, headers, kind));
    return text;
  }

  /** A link that saves the body. */
  #save(blob, headers, kind) {
    const named = /filename="([^"]+)"/.exec(headers.get("content-disposition") ?? "")?.[1];
    const suffix = { "application/x-npy": "npy", "application/x-npz": "npz" }[kind] ?? "bin";
    const url = URL.createObjectURL(blob);
    this.urls.push(url);
    const name = named ?? `answer.${suffix}`;
    return h("p", {}, h("a", { class: "button", href: url, download: name }, `Save ${name}`));
  }
}

/** Attributes of what scrolls: the keyboard has to reach it. */
const region = (label) => ({ tabindex: "0", role: "region", "aria-label": label });

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // cut off on the way
  }
}

/** Server-sent events as they come. */
async function streamed(response, body, label) {
  const place = h("pre", region(label));
  body.replaceChildren(place);
  let text = "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return text;
    text = (text + value).slice(-MOST_TEXT);
    place.textContent = text;
  }
}

/** What an array is, and its first elements. */
function arrayText(name, buffer, place) {
  let array;
  try {
    array = parse(buffer);
  } catch (error) {
    if (!(error instanceof NpyError)) throw error;
    return h("p", {}, name ? h("b", {}, `${name}: `) : null, error.message);
  }
  const { rows, columns, index } = firstMatrix(array);
  const written = (k) => {
    const [re, im] = [array.real(k), array.imag(k)].map((value) => (Number.isInteger(value) ? value : Number(value.toPrecision(4))));
    return array.complex ? `${re}${im < 0 || Object.is(im, -0) ? "-" : "+"}${Math.abs(im)}j` : String(re);
  };
  const lines = [];
  for (let i = 0; i < Math.min(rows, MOST_ELEMENTS); i += 1) {
    const cells = [];
    for (let j = 0; j < Math.min(columns, MOST_ELEMENTS); j += 1) cells.push(h("td", {}, written(index(i, j))));
    lines.push(h("tr", {}, cells));
  }
  const cut = rows > MOST_ELEMENTS || columns > MOST_ELEMENTS || array.shape.length > 2;
  const label = `${name ? `${name}: ` : ""}${array.dtype}, ${shape(array.shape)}, ${array.fortran ? "Fortran" : "C"} order${cut ? "; its first elements" : ""}`;
  return h("div", { class: "scroll", ...region(name ? `${place}: ${name}` : place) },
    h("table", { class: "elements" }, h("caption", {}, label), h("tbody", {}, lines)));
}

/** Files of a .npz whose members are not compressed: [name, bytes] each, by its central directory. */
function members(buffer) {
  const view = new DataView(buffer);
  const text = (at, length) => new TextDecoder().decode(new Uint8Array(buffer, at, length));
  let end = buffer.byteLength - 22;
  while (end >= 0 && view.getUint32(end, true) !== 0x06054b50) end -= 1;
  if (end < 0) return [];
  const found = [];
  let at = view.getUint32(end + 16, true);
  for (let left = view.getUint16(end + 10, true); left > 0; left -= 1) {
    const [size, name, extra, comment] = [
      view.getUint32(at + 24, true), view.getUint16(at + 28, true), view.getUint16(at + 30, true), view.getUint16(at + 32, true),
    ];
    const local = view.getUint32(at + 42, true);
    const called = text(at + 46, name);
    const data = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
    if (called.endsWith(".npy")) found.push([called.slice(0, -4), buffer.slice(data, data + size)]);
    at += 46 + name + extra + comment;
  }
  return found;
}
