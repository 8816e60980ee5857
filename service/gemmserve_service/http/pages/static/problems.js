// /problems: the search field.

import { onTarget, searchField } from "./filter.js";

const sections = [...document.querySelectorAll(".entry")];
const clear = searchField(document.getElementById("find"), {
  label: "Find a problem",
  entries: sections.map((section) => ({
    text: section.textContent.toLowerCase(),
    shows: [section, document.querySelector(`.contents a[href="#${section.id}"]`).parentElement],
  })),
});
onTarget((element) => {
  if (!element.hidden) return;
  clear();
  element.scrollIntoView();
});
