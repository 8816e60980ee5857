// Forms to try an operation with, made of its part of the OpenAPI document.

import { Answer } from "./answer.js";
import { h, problemText } from "./dom.js";
import { format } from "./npy.js";
import { authorization, onSession, root, signedIn, signIn } from "./session.js";

/** Header fields that browsers let no page set. */
const FORBIDDEN = new Set(["accept-encoding"]);
const ID = /\b(arr|job|upl)_[0-9a-z]{26}(_[1-9][0-9]{0,2})?\b/g;
const EXAMPLE_ID = /arr_[0-9a-z]{26}/g;
const NPY = "application/x-npy";

let opened; // the document, a promise
let forms = 0;

/** Ids that answers have told of, the newest first, by their first three letters. */
const recent = { arr: [], job: [], upl: [] };

/** Error of a form that is not filled in; `field` is where. */
class InputError extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

function openapi() {
  opened ??= fetch(new URL("openapi.json", root), { credentials: "omit" }).then(
    (response) => (response.ok ? response.json() : Promise.reject(new Error(`the server answered ${response.status}`))),
  );
  opened.catch(() => {
    opened = undefined; // another attempt may succeed
  });
  return opened;
}

let looked = false;

/** Asks for ids of what there is already, once, where no key is wanted or one is known. */
async function lookForIds(keys) {
  if (looked || (keys && !signedIn())) return;
  looked = true;
  for (const [kind, path] of [["arr", "v1/arrays"], ["job", "v1/jobs"]]) {
    const response = await fetch(new URL(`${path}?limit=2`, root), { headers: authorization(), credentials: "omit" });
    if (!response.ok) continue;
    const { items } = await response.json();
    // Behind what has been made here meanwhile, which is newer.
    recent[kind] = [...new Set([...recent[kind], ...items.map(({ id }) => id)])].slice(0, 20);
    listRecent(kind);
  }
}

onSession((there) => {
  if (there) return;
  looked = false; // somebody else may sign in
  for (const kind of Object.keys(recent)) {
    recent[kind] = [];
    listRecent(kind);
  }
});

/** Puts the form of an operation into `place`. `keys`: whether the server has API keys. */
export async function openForm(place, method, path, keys) {
  let whole;
  try {
    [whole] = await Promise.all([openapi(), lookForIds(keys)]);
  } catch (error) {
    place.querySelector("button").disabled = false;
    place.querySelector(".error")?.remove();
    place.append(problemText(error, root));
    return;
  }
  const operation = whole.paths[path][method.toLowerCase()];
  const form = new OperationForm(whole, operation, method, path);
  place.replaceChildren(form.element);
  form.element.querySelector("input, select, textarea, button").focus();
}

function resolved(whole, schema) {
  return schema.$ref ? schema.$ref.split("/").slice(1).reduce((node, part) => node[part], whole) : schema;
}

/** The values that a schema lists; [] where it admits others too. */
function choices(whole, schema) {
  const plain = resolved(whole, schema);
  if (plain.enum) return plain.enum;
  if (plain.type === "boolean") return [true, false];
  const options = (plain.anyOf ?? []).filter((option) => option.type !== "null");
  return options.length === 1 ? choices(whole, options[0]) : [];
}

class OperationForm {
  constructor(whole, operation, method, path) {
    forms += 1;
    this.prefix = `try-${forms}`;
    this.whole = whole;
    this.method = method;
    this.path = path;
    const parameters = (operation.parameters ?? []).filter(
      (each) => !(each.in === "header" && FORBIDDEN.has(each.name.toLowerCase())),
    );
    this.parameters = parameters.map((each) => ({ ...each, field: this.#parameter(each) }));
    this.accept = this.#accept(operation);
    this.body = operation.requestBody ? this.#body(operation.requestBody) : null;
    this.send = h("button", { class: "primary" }, "Send");
    this.stop = h("button", { type: "button", hidden: true, onclick: () => this.abort?.abort() }, "Stop");
    this.said = h("p", { class: "error", role: "alert", hidden: true });
    this.answer = new Answer(`${method} ${path}`);
    this.element = h("form", { class: "card form", novalidate: true, "aria-label": `Try ${method} ${path}` },
      this.parameters.map((each) => each.field.element), this.accept?.element, this.body?.element,
      this.said, h("div", { class: "buttons" }, this.stop, this.send), this.answer.element);
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
  }

  /** A control under its label; `hint` is said below. */
  #labelled(name, control, { required = false, hint = "" } = {}) {
    const id = `${this.prefix}-${name.replace(/\W/g, "-").toLowerCase()}`;
    control.id = id;
    if (required) control.required = true;
    if (hint) control.setAttribute("aria-describedby", `${id}-hint`);
    return h("div", { class: "field" },
      h("label", { for: id }, name, required ? h("span", { class: "muted" }, " (required)") : null),
      control, hint ? h("p", { class: "muted hint", id: `${id}-hint` }, hint) : null);
  }

  #parameter({ name, in: where, required, schema, description, example }) {
    const values = choices(this.whole, schema);
    const several = resolved(this.whole, schema).type === "array";
    let control;
    if (values.length) {
      control = h("select", {}, required ? null : h("option", { value: "" }, "–"),
        values.map((value) => h("option", { value: String(value) }, String(value))));
    } else if (several) {
      control = h("textarea", { rows: "2", spellcheck: "false" });
    } else {
      const placeholder = [example ?? schema.examples?.[0] ?? ""].flat().join("");
      control = h("input", { type: "text", autocomplete: "off", spellcheck: "false", placeholder });
      this.#suggest(name, control);
    }
    const hint = `${where === "path" ? "" : `${where}: `}${description ?? ""}${several ? "; one a line" : ""}`;
    const element = this.#labelled(name, control, { required, hint });
    const read = () => {
      const text = control.value.trim();
      if (!text && required) throw new InputError(`${name} is needed.`, control);
      return several ? text.split("\n").map((line) => line.trim()).filter(Boolean) : text ? [text] : [];
    };
    return { element, read };
  }

  /** Ids that answers told of, in fields that want one. */
  #suggest(name, control) {
    const kind = { array_id: "arr", job_id: "job", upload_id: "upl" }[name];
    if (!kind) return;
    control.value = recent[kind][0] ?? "";
    const list = `recent-${kind}`;
    if (!document.getElementById(list)) document.body.append(h("datalist", { id: list }));
    listRecent(kind);
    control.setAttribute("list", list);
  }

  /** The media types of an answer that has several. */
  #accept(operation) {
    const kinds = Object.entries(operation.responses)
      .filter(([status]) => status.startsWith("2"))
      .flatMap(([, response]) => Object.keys(response.content ?? {}));
    const unique = [...new Set(kinds)];
    if (unique.length < 2) return null;
    const control = h("select", {}, h("option", { value: "" }, "–"),
      unique.map((kind) => h("option", { value: kind }, kind)));
    return { element: this.#labelled("Accept", control, { hint: "header: what the answer may be" }), read: () => control.value };
  }

  #body({ content }) {
    const kinds = Object.keys(content);
    const place = h("div", { class: "form" });
    let part;
    const choose = (kind) => {
      part = this.#media(kind, content[kind]);
      place.replaceChildren(...[part.element].flat(2));
    };
    choose(kinds[0]);
    if (kinds.length === 1) return { element: place, read: () => part.read() };
    const control = h("select", { onchange: () => choose(control.value) },
      kinds.map((kind) => h("option", { value: kind }, kind)));
    return {
      element: h("div", { class: "form" }, this.#labelled("Body", control), place),
      read: () => part.read(),
    };
  }

  /** Fields of a body of that media type; `read` gives what fetch takes. */
  #media(kind, media) {
    if (kind === "application/json") {
      const { element, read } = this.#json("JSON", media, true);
      return { element, read: () => ({ headers: { "Content-Type": kind }, body: read() }) };
    }
    if (kind !== "multipart/form-data") {
      const { element, read } = this.#file("File", { required: true, npy: kind === NPY });
      return { element, read: () => ({ headers: { "Content-Type": kind }, body: read() }) };
    }
    const schema = resolved(this.whole, media.schema);
    const parts = Object.entries(schema.properties).map(([name, property]) => {
      const required = schema.required?.includes(name) ?? false;
      const binary = property.format === "binary";
      const field = binary
        ? this.#file(name, { required, npy: true, hint: property.description })
        : this.#json(name, { example: media.example?.[name] ?? {} }, required);
      return { name, binary, ...field };
    });
    // Parameters first: what does not fit them is refused before the data are sent.
    const ordered = [...parts.filter((part) => !part.binary), ...parts.filter((part) => part.binary)];
    return {
      element: parts.map((part) => part.element),
      read: () => {
        const form = new FormData();
        for (const { name, binary, read } of ordered) {
          const value = read();
          if (value === null) continue;
          const type = binary ? NPY : "application/json";
          form.append(name, new Blob([value], { type }), binary ? `${name}.npy` : `${name}.json`);
        }
        return { headers: {}, body: form };
      },
    };
  }

  #json(name, media, required) {
    const named = media.examples ?? { example: { value: media.example ?? {} } };
    const control = h("textarea", { spellcheck: "false", class: "code" });
    const fill = (example) => {
      control.value = withRecent(JSON.stringify(named[example].value, null, 2));
      control.rows = Math.min(control.value.split("\n").length + 1, 20);
    };
    const names = Object.keys(named);
    fill(names[0]);
    const element = [this.#labelled(name, control, { required })];
    if (names.length > 1) {
      const chooser = h("select", { onchange: () => fill(chooser.value) },
        names.map((each) => h("option", { value: each }, each)));
      element.unshift(this.#labelled(`Example of ${name}`, chooser));
    }
    const read = () => {
      const text = control.value.trim();
      if (!text) {
        if (required) throw new InputError(`${name} is needed.`, control);
        return null;
      }
      try {
        JSON.parse(text);
      } catch (error) {
        throw new InputError(`${name} is no JSON: ${error.message}`, control);
      }
      return text;
    };
    return { element, read };
  }

  #file(name, { required, npy, hint = "" }) {
    const control = h("input", { type: "file", accept: npy ? ".npy" : null });
    let example = null;
    const note = h("span", { class: "muted", role: "status" });
    const take = h("button", { type: "button", class: "quiet" }, "Use an example");
    take.addEventListener("click", () => {
      example = fourier();
      control.value = "";
      note.textContent = "the 4 × 4 DFT matrix, complex64";
    });
    control.addEventListener("change", () => {
      example = null;
      note.textContent = "";
    });
    const element = h("div", {}, this.#labelled(name, control, { required, hint }), npy ? h("div", {}, take, note) : null);
    const read = () => {
      if (control.files.length) return control.files[0];
      if (example) return example;
      if (required) throw new InputError(`${name}: choose a file${npy ? ", or use the example" : ""}.`, control);
      return null;
    };
    return { element, read };
  }

  async #submit() {
    this.said.hidden = true;
    let url, init;
    try {
      ({ url, init } = this.#request());
    } catch (error) {
      if (!(error instanceof InputError)) throw error;
      this.said.textContent = error.message;
      this.said.hidden = false;
      error.field.focus();
      return;
    }
    this.abort = new AbortController();
    this.send.disabled = true;
    this.stop.hidden = false;
    try {
      this.answer.wait(`${this.method} ${url}`);
      const began = performance.now();
      const response = await this.#fetch(url, { ...init, signal: this.abort.signal });
      const text = await this.answer.show(response, this.method, began);
      for (const [id, kind] of [...text.matchAll(ID)].reverse()) remember(id, kind);
    } catch (error) {
      this.answer.fail(error);
    } finally {
      this.send.disabled = false;
      this.stop.hidden = true;
    }
  }

  #request() {
    let path = this.path;
    const query = new URLSearchParams();
    const headers = {};
    for (const { name, in: where, field } of this.parameters) {
      for (const value of field.read()) {
        if (where === "path") path = path.replace(`{${name}}`, encodeURIComponent(value));
        else if (where === "query") query.append(name, value);
        else headers[name] = value;
      }
    }
    const accept = this.accept?.read();
    if (accept) headers.Accept = accept;
    const body = this.body?.read();
    const url = new URL(path.slice(1), root);
    url.search = query;
    return { url, init: { method: this.method, headers: { ...headers, ...body?.headers }, body: body?.body } };
  }

  /** fetch with the key; where the server wants one, it is asked for, and the request sent again. */
  async #fetch(url, init) {
    for (;;) {
      const response = await fetch(url, {
        ...init, headers: { ...init.headers, ...authorization() }, credentials: "omit", cache: "no-store",
      });
      if (response.status !== 401) return response;
      const problem = signedIn() ? await response.clone().json().catch(() => ({})) : {};
      if (!(await signIn(problem.detail))) return response;
    }
  }
}

/** A .npy of the 4 x 4 DFT matrix: its elements are powers of -j, and with its conjugate transpose it makes 4 I. */
function fourier() {
  const powers = [[1, 0], [0, -1], [-1, 0], [0, 1]];
  const elements = Array.from({ length: 16 }, (_, k) => powers[((k >> 2) * (k & 3)) % 4]);
  return new Blob([format("complex64", [4, 4], new Float32Array(elements.flat()))], { type: NPY });
}

/** An example with arrays that are there in the place of those that were made up. */
function withRecent(text) {
  if (!recent.arr.length) return text;
  const named = [...new Set(text.match(EXAMPLE_ID) ?? [])];
  return text.replace(EXAMPLE_ID, (id) => recent.arr[named.indexOf(id)] ?? recent.arr[0]);
}

function remember(id, kind) {
  recent[kind] = [id, ...recent[kind].filter((other) => other !== id)].slice(0, 20);
  listRecent(kind);
}

function listRecent(kind) {
  document.getElementById(`recent-${kind}`)?.replaceChildren(...recent[kind].map((value) => h("option", { value })));
}
