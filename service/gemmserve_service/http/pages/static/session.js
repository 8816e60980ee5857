// The API with the user's key. The key is in this module's memory alone: never in storage, a cookie or an address, so a
// page that is loaded again asks for it again.

import { h } from "./dom.js";

/** Root of the server as the browser sees it, a proxy's prefix included; every path is relative to it. */
export const root = new URL("../", import.meta.url);

let key = null;
let asking = null; // the sign-in that is open, a promise: requests that are refused meanwhile wait for the same one
const listeners = new Set();

/** Error of a request: an RFC 9457 problem, or something that stands for one where the answer was none. */
export class ApiProblem extends Error {
  /** @param {{title: string, detail?: string, status?: number, type?: string}} problem */
  constructor(problem) {
    super(problem.detail ? `${problem.title}: ${problem.detail}` : problem.title);
    this.problem = problem;
    this.status = problem.status ?? 0;
    this.unanswered = false; // whether nothing came back at all
  }
}

export const signedIn = () => key !== null;

/** Header fields that a request of one's own making has to carry. */
export const authorization = () => (key === null ? {} : { Authorization: `Bearer ${key}` });

/** Calls `listener(signedIn)` after each change; returns the function that ends it. */
export function onSession(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function become(value) {
  key = value;
  for (const listener of [...listeners]) listener(key !== null);
}

export function signOut() {
  become(null);
}

/**
 * fetch of a path relative to `root`, with the key; 401 asks for a key and tries again with it.
 * Resolves with a Response that is ok; else throws ApiProblem, or what fetch throws for `init.signal`.
 */
export async function api(path, init = {}) {
  for (;;) {
    const used = key;
    let response;
    try {
      response = await fetch(new URL(path, root), {
        ...init,
        headers: { ...init.headers, ...authorization() },
        credentials: "omit",
        cache: "no-store",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw Object.assign(new ApiProblem({ title: "The server cannot be reached", detail: "no answer came" }), { unanswered: true });
    }
    if (response.ok) return response;
    const problem = await problemOf(response);
    if (response.status !== 401) throw new ApiProblem(problem);
    // Somebody has signed in since this request left: that key has not been refused yet.
    if (key !== used && key !== null) continue;
    if (used !== null) become(null);
    if (!(await signIn(used === null ? "" : problem.detail))) throw new ApiProblem(problem);
  }
}

/** `api` for a thing that may belong to another owner: where it is not found, an admin's key looks at everybody's. */
export async function apiOfAnybody(path, init = {}) {
  try {
    return await api(path, init);
  } catch (error) {
    if (error.status !== 404 || key === null) throw error;
    try {
      return await api(`${path}${path.includes("?") ? "&" : "?"}all=true`, init);
    } catch (second) {
      throw second.status === 403 ? error : second;
    }
  }
}

/** The problem of an answer that is not ok. */
async function problemOf(response) {
  try {
    const document = await response.json();
    if (typeof document.title === "string") return { ...document, status: response.status };
  } catch {
    // a proxy's page, or none: said below
  }
  return { title: `The server answered ${response.status}`, status: response.status };
}

/** Whether the server takes that key; throws ApiProblem for anything else than yes or no. */
async function refusal(candidate) {
  let response;
  try {
    response = await fetch(new URL("v1/usage", root), {
      headers: { Authorization: `Bearer ${candidate}` },
      credentials: "omit",
      cache: "no-store",
    });
  } catch {
    return "The server cannot be reached.";
  }
  if (response.ok) return "";
  const problem = await problemOf(response);
  return problem.detail ?? problem.title;
}

/**
 * Asks for a key, in a dialog; `reason` says why, in the server's words. Resolves with whether there is one now.
 * A second call while it is open is answered with the first.
 */
export function signIn(reason = "") {
  asking ??= dialog(reason).finally(() => {
    asking = null;
  });
  return asking;
}

function dialog(reason) {
  const said = h("p", { class: "error", id: "sign-in-error", role: "alert", hidden: !reason }, reason);
  const input = h("input", {
    type: "password", id: "sign-in-key", required: true, autocomplete: "off", spellcheck: "false", placeholder: "gs_…",
    "aria-describedby": "sign-in-error sign-in-hint",
  });
  const submit = h("button", { class: "primary" }, "Sign in");
  const cancel = h("button", { type: "button" }, "Cancel");
  const form = h("form", { method: "dialog", novalidate: true },
    h("h2", { id: "sign-in-title" }, "Sign in with an API key"),
    said,
    h("div", { class: "field" }, h("label", { for: "sign-in-key" }, "API key"), input),
    h("p", { class: "muted", id: "sign-in-hint" },
      "It stays in this page's memory, and is forgotten when the page is closed or loaded again."),
    h("div", { class: "buttons" }, cancel, submit));
  const box = h("dialog", { "aria-labelledby": "sign-in-title" }, form);
  document.body.append(box);
  return new Promise((resolve) => {
    cancel.addEventListener("click", () => box.close());
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const candidate = input.value.trim();
      // A header holds no other characters: fetch would throw, and no key has any.
      const why = /^[\x21-\x7e]+$/.test(candidate) ? await check(candidate) : "A key has letters, digits and _ alone.";
      if (!box.open) return; // closed meanwhile
      if (why) {
        said.textContent = why;
        said.hidden = false;
        input.select();
        input.focus();
        return;
      }
      become(candidate);
      box.close();
    });
    box.addEventListener("close", () => {
      input.value = "";
      box.remove();
      resolve(key !== null);
    });
    box.showModal();
    input.focus();

    async function check(candidate) {
      submit.disabled = true;
      try {
        return await refusal(candidate);
      } finally {
        submit.disabled = false;
      }
    }
  });
}

/** Fills the bar's corner (`frame.document(session=True)`): a button to sign in or out, where the server wants keys. */
export function showSession(place, { wanted }) {
  const show = () => {
    if (!wanted && !signedIn()) {
      place.replaceChildren();
      return;
    }
    const button = h("button", { type: "button" }, signedIn() ? "Sign out" : "Sign in");
    button.addEventListener("click", () => (signedIn() ? signOut() : signIn()));
    place.replaceChildren(button);
  };
  onSession(show);
  show();
}
