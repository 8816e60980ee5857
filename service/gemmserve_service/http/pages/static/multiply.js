// A form that multiplies: two .npy files in one request, or arrays of the server, by id or name, in a job.

import { h, problemText } from "./dom.js";
import { bytes, shape } from "./format.js";
import { save } from "./arrays.js";
import { format, parse } from "./npy.js";
import { viewer } from "./picture.js";
import { ApiProblem, api, root, signedIn } from "./session.js";

const ID = /^arr_[0-9a-z]+(_[1-9][0-9]{0,2})?$/;
const FINAL = new Set(["succeeded", "failed", "cancelled", "expired"]);
const TRANSPOSES = [["N", "as it is"], ["T", "transposed"], ["C", "conjugate transposed"], ["R", "conjugated"]];
const LARGEST = 2 ** 28; // bytes of a result that is brought here whole; of larger ones a sample
const EXAMPLE = 192;

/** Two operands whose product is worth a look: responses of a line of sensors, and of sources at five angles. */
function example() {
  const steer = new Float32Array(2 * EXAMPLE * EXAMPLE);
  const field = new Float32Array(2 * EXAMPLE * EXAMPLE);
  const angles = [-0.72, -0.31, 0.02, 0.38, 0.66];
  for (let i = 0; i < EXAMPLE; i += 1) {
    for (let j = 0; j < EXAMPLE; j += 1) {
      const at = 2 * (i * EXAMPLE + j);
      const direction = (2 * i) / EXAMPLE - 1;
      const taper = Math.sin((Math.PI * (j + 0.5)) / EXAMPLE) ** 2;
      steer[at] = taper * Math.cos(Math.PI * direction * j);
      steer[at + 1] = -taper * Math.sin(Math.PI * direction * j);
      angles.forEach((angle, source) => {
        const moving = angle + 0.12 * Math.sin((2 * Math.PI * j) / EXAMPLE + source);
        field[at] += Math.cos(Math.PI * moving * i) / (source + 1);
        field[at + 1] += Math.sin(Math.PI * moving * i) / (source + 1);
      });
    }
  }
  const file = (name, data) => new File([format("complex64", [EXAMPLE, EXAMPLE], data)], name, { type: "application/x-npy" });
  return { a: file("steering.npy", steer), b: file("field.npy", field) };
}

/** Makes the form, which calls `made()` after a job; returns {element, choose(name, info), clear()}. */
export function multiplyForm(made) {
  const operands = { a: operand("a", "A"), b: operand("b", "B") };
  const submit = h("button", { class: "primary" }, "Multiply");
  const cancel = h("button", { type: "button", hidden: true, onclick: () => controller?.abort() }, "Cancel");
  const fill = h("button", { type: "button", class: "quiet", onclick: takeExample }, "Fill in an example");
  const status = h("p", { class: "muted", role: "status" });
  const result = h("div", {});
  const form = h("form", { class: "multiply", novalidate: true, onsubmit: run },
    operands.a.element, operands.b.element, h("div", { class: "toolbar" }, submit, cancel, fill, status));
  let controller = null;
  return {
    element: h("div", {}, form, result),
    choose(name, info) {
      operands[name].text.value = info.id;
      operands[name].file.value = "";
      form.scrollIntoView({ block: "center" });
      operands[name].text.focus();
    },
    clear() {
      controller?.abort();
      result.replaceChildren();
      status.textContent = "";
    },
  };

  function operand(name, title) {
    const file = h("input", { type: "file", id: `file-${name}`, accept: ".npy,application/x-npy", onchange: () => { text.value = ""; } });
    const text = h("input", {
      id: `text-${name}`, autocomplete: "off", spellcheck: "false", placeholder: "arr_… or a name",
      oninput: () => { file.value = ""; },
    });
    const transpose = h("select", { id: `trans-${name}` }, TRANSPOSES.map(([value, words]) => h("option", { value }, words)));
    const element = h("fieldset", {}, h("legend", {}, title),
      h("div", { class: "field" }, h("label", { for: `file-${name}` }, ".npy file"), file),
      h("div", { class: "field" }, h("label", { for: `text-${name}` }, "or an array of the server"), text),
      h("div", { class: "field" }, h("label", { for: `trans-${name}` }, "taken"), transpose));
    return { element, file, text, transpose };
  }

  function takeExample() {
    for (const [name, file] of Object.entries(example())) {
      const transfer = new DataTransfer();
      transfer.items.add(file);
      operands[name].file.files = transfer.files;
      operands[name].text.value = "";
    }
    submit.focus();
  }

  async function run(event) {
    event.preventDefault();
    controller?.abort();
    const mine = (controller = new AbortController());
    result.replaceChildren();
    submit.disabled = true;
    cancel.hidden = false;
    try {
      for (const name of ["a", "b"]) {
        const { file, text } = operands[name];
        if (!file.files.length && !text.value.trim()) {
          text.focus();
          throw new ApiProblem({ title: `${name.toUpperCase()} is missing`, detail: "choose a .npy file, or name an array of the server" });
        }
      }
      const both = operands.a.file.files.length && operands.b.file.files.length;
      await (both ? oneShot(mine.signal) : job(mine.signal));
    } catch (error) {
      status.textContent = error.name === "AbortError" ? "Cancelled." : "";
      if (error.name !== "AbortError") result.replaceChildren(problemText(error, root));
    } finally {
      if (controller === mine) {
        submit.disabled = false;
        cancel.hidden = true;
      }
    }
  }

  function transposes() {
    return { trans_a: operands.a.transpose.value, trans_b: operands.b.transpose.value };
  }

  async function oneShot(signal) {
    status.textContent = "Sending and multiplying…";
    const body = new FormData();
    // First, so that a mismatch is refused before the data are sent.
    body.append("params", new Blob([JSON.stringify(transposes())], { type: "application/json" }));
    for (const name of ["a", "b"]) body.append(name, operands[name].file.files[0], `${name}.npy`);
    const response = await api("v1/gemm", { method: "POST", body, signal });
    const blob = await response.blob();
    await show(blob, response.headers.get("Gemm-Algorithm"));
  }

  /** Id of an operand: as given, the newest of a name, or that of its file once it is uploaded, which `uploaded` notes. */
  async function idOf(name, uploaded, signal) {
    const { file, text } = operands[name];
    if (file.files.length) {
      status.textContent = `Uploading ${name.toUpperCase()}…`;
      const response = await api("v1/arrays?ttl_s=3600", {
        method: "POST", body: file.files[0], headers: { "Content-Type": "application/x-npy" }, signal,
      });
      uploaded.push((await response.json()).id);
      return uploaded.at(-1);
    }
    const given = text.value.trim();
    if (ID.test(given)) return given;
    const { items } = await (await api(`v1/arrays?${new URLSearchParams({ name: given, limit: "1" })}`, { signal })).json();
    if (!items.length) throw new ApiProblem({ title: `No array is called ${given}`, detail: signedIn() ? "among those that this key sees" : "names are whole ones, as a card under Arrays has them" });
    return items[0].id;
  }

  async function job(signal) {
    const uploaded = [];
    try {
      await productOf(uploaded, signal);
    } finally {
      // Files were for this product alone; of a product that failed nothing stays either.
      for (const id of uploaded) await api(`v1/arrays/${id}`, { method: "DELETE" }).catch(() => null);
      made();
    }
  }

  async function productOf(uploaded, signal) {
    const request = { op: "gemm", a: await idOf("a", uploaded, signal), b: await idOf("b", uploaded, signal), ttl_s: 3600, ...transposes() };
    status.textContent = "Multiplying…";
    const response = await api("v1/jobs", {
      method: "POST", body: JSON.stringify(request), headers: { "Content-Type": "application/json" }, signal,
    });
    let info = await response.json();
    try {
      while (!FINAL.has(info.state)) info = await (await api(`v1/jobs/${info.id}?wait=20`, { signal })).json();
    } catch (error) {
      // What has ended meanwhile cannot be cancelled, and need not be.
      if (error.name === "AbortError") await api(`v1/jobs/${info.id}`, { method: "DELETE" }).catch(() => null);
      throw error;
    }
    if (info.state !== "succeeded") throw new ApiProblem(info.error ?? { title: `The job is ${info.state}` });
    const id = info.result.d;
    const array = await (await api(`v1/arrays/${id}`, { signal })).json();
    const link = h("a", { href: `#${id}` }, id);
    if (array.nbytes > LARGEST) {
      result.replaceChildren(h("p", {}, `${array.dtype} ${shape(array.shape)}, ${bytes(array.nbytes)}: stored as `, link, "."));
      status.textContent = "Done.";
    } else {
      const data = await api(`v1/arrays/${id}/data`, { headers: { Accept: "application/x-npy" }, signal });
      await show(await data.blob(), info.algorithm, h("p", {}, "Stored for an hour as ", link, "."));
    }
  }

  async function show(blob, algorithm, note = null) {
    const array = parse(await blob.arrayBuffer());
    result.replaceChildren(h("div", { class: "result" }, viewer(array), h("div", { class: "about" },
      h("p", {}, h("strong", {}, `${array.dtype} ${shape(array.shape)}`), h("br"),
        h("span", { class: "muted" }, [bytes(blob.size), algorithm && `by ${algorithm}`].filter(Boolean).join(", "))),
      note, h("p", {}, h("button", { type: "button", onclick: () => save(blob, "product.npy") }, "Download .npy")))));
    status.textContent = "Done.";
  }
}
