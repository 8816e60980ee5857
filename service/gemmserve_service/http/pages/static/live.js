// Server-sent events by fetch, which can carry a key in a header; EventSource could only carry it in the address.

import { api } from "./session.js";

/** Events of a text of the HTML standard, section 9.2.6, that comes in pieces; `event.data` is what JSON it holds. */
export class EventParser {
  #rest = "";
  #name = "";
  #data = [];
  #skipLineFeed = false;

  /** @param {string} text @returns {{name: string, data: any}[]} the events that it completes */
  feed(text) {
    const found = [];
    if (this.#skipLineFeed && text) {
      if (text[0] === "\n") text = text.slice(1);
      this.#skipLineFeed = false;
    }
    this.#skipLineFeed = text.endsWith("\r"); // its line feed may be in the next piece
    const lines = (this.#rest + text).split(/\r\n|\n|\r/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) found.push({ name: this.#name || "message", data: JSON.parse(this.#data.join("\n")) });
        this.#name = "";
        this.#data = [];
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "event") this.#name = value;
      else if (field === "data") this.#data.push(value);
    }
    return found;
  }
}

/** The events at a path, as long as the connection holds. Throws ApiProblem, or what fetch throws for the signal. */
export async function* events(path, signal) {
  const response = await api(path, { signal, headers: { Accept: "text/event-stream" } });
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    yield* parser.feed(value);
  }
}
