// /docs: search, tabs of samples, links that open what they lead to, and forms to try operations with.

import { h } from "./dom.js";
import { onTarget, searchField } from "./filter.js";
import { root, showSession } from "./session.js";

const page = document.getElementById("operations");
const operations = [...page.querySelectorAll("details.operation")];

const wantsKeys = document.getElementById("main").dataset.keys === "true";
const session = document.getElementById("session");
if (session) showSession(session, { wanted: wantsKeys });

// The samples' address is that under which this page was found.
const address = root.href.replace(/\/$/, "");
for (const block of page.querySelectorAll(".intro pre")) {
  block.textContent = block.textContent.replaceAll("http://127.0.0.1:8000", address);
}

const models = [...page.querySelectorAll("details.model")];
const clear = searchField(document.getElementById("find"), {
  label: "Find an operation or a model",
  hides: [page.querySelector(".intro")],
  sections: [...page.querySelectorAll("section"), ...document.querySelectorAll(".contents > ul > li")],
  entries: [...operations, ...models].map((entry) => {
    const inside = entry.querySelector(".inside");
    const texts = [entry.querySelector("summary"), ...inside.querySelectorAll(":scope > p")];
    const listed = document.querySelector(`.contents [data-for="${inside.id}"]`);
    return {
      text: texts.map((each) => each.textContent).join(" ").toLowerCase(),
      shows: listed ? [entry, listed] : [entry],
    };
  }),
});

onTarget((element) => {
  const details = element.closest("details");
  if (!details) return;
  if (details.hidden || details.closest("section").hidden) clear();
  details.open = true;
  details.scrollIntoView();
});
for (const details of [...operations, ...models]) {
  // The address of what is open may be passed on.
  details.querySelector("summary").addEventListener("click", () => {
    if (!details.open) history.replaceState(null, "", `#${details.querySelector(".inside").id}`);
  });
}

let chosen = "Python";

function choose(label) {
  chosen = label;
  for (const samples of page.querySelectorAll(".samples")) show(samples);
}

/** Shows the sample that is chosen, or the first one where there is none of it. */
function show(samples) {
  const tabs = [...samples.querySelectorAll("[role=tab]")];
  const wanted = tabs.find((tab) => tab.textContent === chosen) ?? tabs[0];
  for (const tab of tabs) {
    tab.setAttribute("aria-selected", String(tab === wanted));
    tab.tabIndex = tab === wanted ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).hidden = tab !== wanted;
  }
}

for (const samples of page.querySelectorAll(".samples")) {
  const blocks = [...samples.querySelectorAll(".sample")];
  const tabs = blocks.map((block) => {
    const { label } = block.dataset;
    const tab = h("button", {
      type: "button", role: "tab", id: `${block.id}-tab`, "aria-controls": block.id, onclick: () => choose(label),
    }, label);
    block.setAttribute("role", "tabpanel");
    block.setAttribute("aria-labelledby", tab.id);
    block.querySelector("h4").remove();
    const source = block.querySelector("pre");
    const copied = h("button", { type: "button", class: "copy", "aria-label": `Copy the ${label} sample` }, "Copy");
    copied.addEventListener("click", async () => {
      copied.textContent = (await copy(source.textContent)) ? "Copied" : "Not copied";
      setTimeout(() => {
        copied.textContent = "Copy";
      }, 2000);
    });
    block.append(copied);
    return tab;
  });
  const list = h("div", { role: "tablist", "aria-label": "Samples" }, tabs);
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = tabs[(tabs.indexOf(event.target) + step + tabs.length) % tabs.length];
    choose(next.textContent);
    next.focus();
  });
  samples.prepend(list);
  show(samples);
}

/** Whether the text is in the clipboard now. */
async function copy(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  // Without TLS browsers have the old way alone.
  const area = h("textarea", { class: "visually-hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

for (const place of page.querySelectorAll(".try")) {
  const { method, path } = place.closest("details").dataset;
  const begin = h("button", { type: "button", class: "primary" }, "Try it");
  begin.addEventListener("click", async () => {
    begin.disabled = true;
    const { openForm } = await import("./try_it.js");
    await openForm(place, method, path, wantsKeys);
  });
  place.append(begin);
}
