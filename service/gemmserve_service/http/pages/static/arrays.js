// Arrays: the newest with a thumbnail of |x| each, search by name, and a view of one.

import { h, openDialog, problemText } from "./dom.js";
import { ago, bytes, shape } from "./format.js";
import { parse } from "./npy.js";
import { thumbnail, viewer } from "./picture.js";
import { api, apiOfAnybody, root } from "./session.js";

const SHOWN = 12;
const SEARCHED = 200;

const titleOf = (info) => info.name ?? info.id;
const kindOf = (info) => `${info.dtype} ${shape(info.shape)}`;

/** A sample of an array; null where it is on a device alone. */
async function sampleOf(id, signal) {
  const response = await apiOfAnybody(`v1/arrays/${id}/sample`, { signal });
  return response.status === 204 ? null : parse(await response.arrayBuffer());
}

/**
 * Newest arrays that `text` finds: by their whole name anywhere, by a part of name or id among the newest 200.
 * `all`: "" or "&all=true".
 */
export async function find(text, all, signal) {
  const page = async (query) => (await (await api(`v1/arrays?${query}${all}`, { signal })).json()).items;
  if (!text) return page(`limit=${SHOWN}`);
  const part = text.toLowerCase();
  // Only what can be a name is asked for: anything else would be refused.
  const name = /^[A-Za-z0-9_][A-Za-z0-9_.:/@+-]{0,127}$/.test(text) && new URLSearchParams({ limit: String(SHOWN), name: text });
  const pages = await Promise.all([name ? page(name) : [], page(`limit=${SEARCHED}`)]);
  const found = new Map();
  for (const info of pages.flat()) {
    if (info.name === text || info.id.includes(part) || info.name?.toLowerCase().includes(part)) found.set(info.id, info);
  }
  return [...found.values()].slice(0, SHOWN);
}

/** Fills `place` with cards of arrays; pictures are asked for when their card is looked at. */
export function showArrays(place, items, signal) {
  const watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watcher.unobserve(target);
      draw(target);
    }
  });
  const byCard = new Map();
  const cards = items.map((info) => {
    const picture = h("div", { class: "thumb" });
    byCard.set(picture, info);
    return h("li", {}, h("a", { class: "array", href: `#${info.id}` }, picture,
      h("span", { class: "name" }, titleOf(info)),
      h("span", { class: "muted" }, kindOf(info)),
      h("span", { class: "muted" }, `${bytes(info.nbytes)}, ${ago(Date.parse(info.created_at) / 1000, Date.now() / 1000)}`)));
  });
  place.replaceChildren(cards.length ? h("ul", { class: "arrays" }, cards) : h("p", { class: "muted" }, "None."),
    cards.length === SHOWN ? h("p", { class: "muted" }, `The newest ${SHOWN}; others are found by name.`) : "");
  for (const picture of byCard.keys()) watcher.observe(picture);
  signal.addEventListener("abort", () => watcher.disconnect());

  async function draw(target) {
    const info = byCard.get(target);
    try {
      const sample = await sampleOf(info.id, signal);
      target.append(sample ? thumbnail(sample, titleOf(info)) : h("span", { class: "muted" }, "on the device"));
    } catch (error) {
      if (error.name !== "AbortError") target.append(h("span", { class: "muted" }, "no picture"));
    }
  }
}

/** Offers bytes as a file. */
export function save(blob, name) {
  const address = URL.createObjectURL(blob);
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** Opens the view of an array; `choose("a" or "b", info)` takes it as an operand of the form. */
export function openArray(id, choose, closed) {
  const controller = new AbortController();
  const { signal } = controller;
  const place = h("div", {}, h("p", { class: "muted" }, "…"));
  const box = openDialog("Array", place, {
    wide: true,
    closed: () => {
      controller.abort();
      closed();
    },
  });
  show();
  return box;

  async function show() {
    try {
      const info = await (await apiOfAnybody(`v1/arrays/${id}`, { signal })).json();
      const said = h("div", {});
      const rows = [
        ["Name", info.name], ["Id", h("code", {}, info.id)], ["Type", kindOf(info)], ["Size", bytes(info.nbytes)],
        ["Made", new Date(info.created_at).toLocaleString()],
        ["Expires", info.expires_at ? new Date(info.expires_at).toLocaleString() : "never: kept until it is deleted"],
        ["Labels", Object.entries(info.labels).map(([key, value]) => `${key}=${value}`).join(", ")], ["Owner", info.owner],
      ];
      const operand = (name) => h("button", {
        type: "button",
        onclick: () => {
          box.close();
          choose(name, info);
        },
      }, `Use as ${name.toUpperCase()}`);
      const picture = h("div", {}, h("p", { class: "muted" }, "…"));
      place.replaceChildren(picture, h("div", { class: "toolbar" },
        h("button", { type: "button", onclick: (event) => download(event.target, info, said) }, "Download .npy"),
        operand("a"), operand("b")), said,
      h("dl", { class: "facts" }, rows.filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
      try {
        const sample = await sampleOf(id, signal);
        picture.replaceChildren(sample ? viewer(sample, { original: info.shape })
          : h("p", { class: "muted" }, "It is on a device alone as yet, and nothing is moved for a picture."));
      } catch (error) {
        if (error.name !== "AbortError") picture.replaceChildren(problemText(error, root));
      }
    } catch (error) {
      if (error.name !== "AbortError") place.replaceChildren(problemText(error, root));
    }
  }

  async function download(button, info, said) {
    button.disabled = true;
    try {
      const response = await apiOfAnybody(`v1/arrays/${info.id}/data`, { headers: { Accept: "application/x-npy" }, signal });
      save(await response.blob(), `${titleOf(info).replaceAll(/[^\w.-]/g, "_")}.npy`);
    } catch (error) {
      if (error.name !== "AbortError") said.replaceChildren(problemText(error, root));
    } finally {
      button.disabled = false;
    }
  }
}
