// A search field over what a page lists.

import { h } from "./dom.js";

/**
 * Puts a search field into `place`: of the entries, those stay whose text has every word. Returns `clear()`.
 * @param {{label: string, entries: {text: string, shows: Element[]}[], sections?: Element[],
 *   hides?: Element[]}} what
 *   `shows`: elements that are hidden with the entry; `sections`: elements that go when nothing of them is left; `hides`:
 *   elements that go while something is searched for.
 */
export function searchField(place, { label, entries, sections = [], hides = [] }) {
  const input = h("input", { type: "search", id: "filter", autocomplete: "off", spellcheck: "false", placeholder: "press /" });
  const found = h("p", { class: "muted found", role: "status" });
  place.replaceChildren(h("div", { class: "field" }, h("label", { for: "filter" }, label), input), found);

  for (const shown of entries.flatMap((entry) => entry.shows)) shown.dataset.entry = "";

  function apply() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const entry of entries) {
      const stays = words.every((word) => entry.text.includes(word));
      count += stays;
      for (const shown of entry.shows) shown.hidden = !stays;
    }
    for (const section of sections) section.hidden = words.length > 0 && !section.querySelector("[data-entry]:not([hidden])");
    for (const other of hides) other.hidden = words.length > 0;
    found.textContent = words.length ? `${count} of ${entries.length}` : "";
  }

  input.addEventListener("input", apply);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Escape") clear();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, dialog")) return;
    event.preventDefault();
    input.focus();
  });

  function clear() {
    input.value = "";
    apply();
  }
  return clear;
}

/** Calls `show(element)` with what the address leads to, now and whenever that changes. */
export function onTarget(show) {
  const go = () => {
    const element = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (element) show(element);
  };
  addEventListener("hashchange", go);
  go();
}
