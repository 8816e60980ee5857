// Elements. Text is always a text node: what a name holds is never read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function made(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** h("p", { class: "muted", onclick: listener }, "text", element, null). */
export const h = (tag, attributes, ...children) => made(document.createElement(tag), attributes, children);

/** The same in SVG. */
export const svg = (tag, attributes, ...children) => made(document.createElementNS(SVG, tag), attributes, children);

/** Makes `from` what `to` is and leaves alone what is equal: focus, selection and scrolling survive. */
export function morph(from, to) {
  if (from.nodeType !== to.nodeType || from.nodeName !== to.nodeName) {
    from.replaceWith(to);
    return;
  }
  if (from.nodeType !== Node.ELEMENT_NODE) {
    if (from.data !== to.data) from.data = to.data;
    return;
  }
  for (const { name } of [...from.attributes]) if (!to.hasAttribute(name)) from.removeAttribute(name);
  for (const { name, value } of to.attributes) if (from.getAttribute(name) !== value) from.setAttribute(name, value);
  morphChildren(from, [...to.childNodes]);
}

/** The same for what an element holds. */
export function morphChildren(element, children) {
  const old = [...element.childNodes];
  children.forEach((child, index) => {
    if (index >= old.length) element.append(child);
    else morph(old[index], child);
  });
  for (const left of old.slice(children.length)) left.remove();
}

/** A word with its colour: ok, warn, bad or none. */
export const pill = (text, kind) => h("span", { class: `pill ${kind}` }, text);

/** An id that may be cut off where there is no room; whole for screen readers and on hovering. */
export const shortId = (id) => h("span", { class: "id", title: id }, id);

/** A share of something as a bar; `label` says the same in words. */
export function gauge(share, label, level = "") {
  const width = `${Math.min(Math.max(share ?? 0, 0), 1) * 100}%`;
  return svg("svg", { class: `gauge ${level}`, role: "img", "aria-label": label, width: "100%", height: "6" },
    svg("rect", { class: "track", width: "100%", height: "6", rx: "3" }),
    svg("rect", { class: "fill", width, height: "6", rx: "3" }));
}

/** A table; `columns`: [heading, class] each, `rows`: lists of what the cells hold, the first one heads its row. */
export function table(caption, columns, rows) {
  const cells = (row) => row.map((cell, index) => {
    const attributes = { class: columns[index][1], "data-label": columns[index][0], role: index ? "cell" : "rowheader" };
    return h(index ? "td" : "th", index ? attributes : { ...attributes, scope: "row" }, cell);
  });
  // The roles are spelt out: narrow screens show rows as blocks, which would take them away.
  return h("table", { role: "table" },
    h("caption", {}, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" },
      columns.map(([name, kind]) => h("th", { scope: "col", role: "columnheader", class: kind }, name)))),
    h("tbody", { role: "rowgroup" }, rows.map((row) => h("tr", { role: "row" }, cells(row)))));
}

/** A moment, in words that `tick` keeps true. */
export function moment(unixSeconds, words) {
  const date = new Date(unixSeconds * 1000);
  return h("time", { datetime: date.toISOString(), title: date.toLocaleString() }, words);
}

let dialogs = 0;

/** Opens a dialog; Escape and its button close it. `closed` is called then. */
export function openDialog(title, body, { wide = false, closed = () => {} } = {}) {
  dialogs += 1;
  const heading = h("h2", { id: `dialog-${dialogs}`, tabindex: "-1" }, title);
  const close = h("button", { type: "button", class: "close", "aria-label": "Close", onclick: () => box.close() }, "×");
  const box = h("dialog", { class: wide ? "wide" : null, "aria-labelledby": heading.id },
    h("div", { class: "dialog-head" }, heading, close), body);
  box.addEventListener("close", () => {
    box.remove();
    closed();
  });
  box.addEventListener("click", (event) => event.target === box && box.close()); // the backdrop
  document.body.append(box);
  box.showModal();
  heading.focus();
  return box;
}

/** An RFC 9457 problem, or any other error, for people: what it is, what it says, where it is explained. */
export function problemText(error, root) {
  const problem = error.problem ?? error;
  const slug = /^\/problems\/([a-z0-9-]+)$/.exec(problem.type ?? "")?.[1];
  return h("div", { class: "error", role: "alert" },
    h("strong", {}, problem.title ?? "Error"), problem.detail || problem.message ? `: ${problem.detail ?? problem.message}` : "",
    slug ? [" ", h("a", { href: new URL(`problems/${slug}`, root).href }, "What to do")] : null);
}
