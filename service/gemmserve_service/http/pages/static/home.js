// The page at /: keeps what the server rendered true, and adds what a table cannot show.

import { find, openArray, showArrays } from "./arrays.js";
import { openChart } from "./chart.js";
import { h, morphChildren, problemText } from "./dom.js";
import { openJob, showJobs } from "./jobs.js";
import { events } from "./live.js";
import { multiplyForm } from "./multiply.js";
import { VIEWS, append, devicesOf, failuresOf, listsOf, memoryOf, queueOf, stateOf, tileOf, timesOf, unreachable } from "./overview.js";
import { api, onSession, root, showSession, signIn, signedIn } from "./session.js";

const LONGEST_PAUSE = 30_000;
const STATE_EVERY = 10_000; // for a page that nobody has signed in to
const JOBS_EVERY = 10_000; // a listing is a look into the database: ten screens shall not be felt
const $ = (id) => document.getElementById(id);

const main = $("main");
const wantsKeys = main.dataset.keys === "true";
const connection = h("span", { class: "connection", role: "status" });
let overview = null;
let history = null;
let chart = null; // the last one that was opened
let dialog = null;
let stream = null; // AbortController of everything that is live

const everybody = () => $("everybody").checked;

/* What the stream tells. */

function say(kind, words) {
  if (connection.textContent === words) return; // said once: it is read aloud
  connection.className = `connection ${kind}`;
  connection.textContent = words;
}

function show() {
  morphChildren($("state"), stateOf(overview));
  morphChildren($("devices"), [devicesOf(overview)]);
  morphChildren($("queue"), [queueOf(overview, wantsKeys)]);
  morphChildren($("memory"), [memoryOf(overview)]);
  morphChildren($("failures"), [failuresOf(overview)]);
}

function showHistory() {
  morphChildren($("tiles"), VIEWS.map((view) => tileOf(view, history)));
  chart?.update();
}

async function live(signal) {
  let pause = 1000;
  while (!signal.aborted) {
    try {
      const whole = await (await api("v1/overview?history=true", { signal })).json();
      ({ history, ...overview } = whole);
      show();
      showHistory();
      reveal(true);
      route();
      for await (const { name, data } of events("v1/overview/stream", signal)) {
        say("good", "Live");
        pause = 1000;
        if (name === "overview") {
          overview = data;
          show();
        } else if (name === "point") {
          append(history, data);
          showHistory();
          if (data.series.products) refreshJobs();
        }
      }
      say("poor", "Connecting again…");
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) {
        leave();
        return;
      }
      reveal(true); // what is asked for by itself may be there
      if (error.unanswered) morphChildren($("state"), unreachable(overview?.time ?? null));
      say("poor", error.problem ? `${error.problem.title}; trying again…` : "Connecting again…");
    }
    await new Promise((resolve) => setTimeout(resolve, pause * (0.75 + Math.random() / 2)));
    pause = Math.min(pause * 2, LONGEST_PAUSE);
  }
}

/** Before anybody has signed in: the state as a page that is loaded now has it. */
async function followState() {
  if (stream || document.hidden) return;
  let state;
  try {
    const response = await fetch(root, { credentials: "omit", cache: "no-store" });
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    state = [...(page.getElementById("state")?.childNodes ?? [])];
  } catch {
    state = unreachable(null);
  }
  if (!stream && state.length) morphChildren($("state"), state);
}

function start() {
  stream?.abort();
  stream = new AbortController();
  const { signal } = stream;
  live(signal);
  refreshJobs(true);
  refreshArrays();
}

/** Ends what is live, and shows nothing that a key had shown. */
function leave() {
  stream?.abort();
  stream = null;
  overview = history = null;
  dialog?.close();
  form.clear();
  for (const id of ["devices", "queue", "memory", "failures", "tiles", "jobs", "arrays"]) $(id).replaceChildren();
  reveal(false);
  say("", "");
}

/** Sections that need data: all of them, or those alone that the server has rendered. */
function reveal(known) {
  $("welcome").hidden = known || !wantsKeys || signedIn();
  for (const section of main.querySelectorAll("section[data-live]")) section.hidden = !known;
}

/* Lists that are asked for. */

let jobsAt = 0;
let jobsSeen = false;

async function refreshJobs(force = false) {
  if (!stream || (!force && (!jobsSeen || document.hidden || performance.now() - jobsAt < JOBS_EVERY))) return;
  jobsAt = performance.now();
  const state = $("jobs-state").value;
  try {
    await showJobs($("jobs"), { ...(state && { state }), ...(everybody() && { all: "true" }) }, stream.signal);
  } catch (error) {
    failed($("jobs"), error);
  }
}

let searching = null;

async function refreshArrays() {
  if (!stream) return;
  searching?.abort();
  const mine = (searching = new AbortController());
  const signal = AbortSignal.any([mine.signal, stream.signal]);
  try {
    const items = await find($("search").value.trim(), everybody() ? "&all=true" : "", signal);
    showArrays($("arrays"), items, signal);
  } catch (error) {
    failed($("arrays"), error);
  }
}

function failed(place, error) {
  if (error.name !== "AbortError") place.replaceChildren(problemText(error, root));
}

/* Views that the address names: #job_..., #arr_..., #chart-... */

function forget() {
  dialog = null;
  // Only its own: another view may have been opened by a link in this one.
  if (/^#(job_|arr_|chart-)/.test(location.hash)) window.history.replaceState(null, "", location.pathname + location.search);
}

function route() {
  const name = decodeURIComponent(location.hash.slice(1));
  const known = /^(job|arr)_[0-9a-z]+(?:_[1-9][0-9]{0,2})?$|^(chart)-/.exec(name)?.slice(1).find(Boolean);
  if (!known || !stream || !history || dialog?.dataset.of === name) return;
  const before = dialog;
  dialog = null;
  before?.close();
  const closed = () => dialog?.dataset.of === name && forget();
  if (known === "job") dialog = openJob(name, closed);
  else if (known === "arr") dialog = openArray(name, form.choose, closed);
  else {
    const view = VIEWS.find(({ id }) => `chart-${id}` === name);
    if (!view) return;
    const { names } = listsOf(view, history);
    chart = openChart({ ...view, names }, () => ({ times: timesOf(history), lists: listsOf(view, history).lists }), closed);
    dialog = chart.box;
  }
  dialog.dataset.of = name;
}

/* Wiring. */

const form = multiplyForm(() => {
  refreshArrays();
  refreshJobs(true);
});
$("no-scripts").remove();
$("multiply").append(form.element);
showSession($("session"), { wanted: wantsKeys });
$("session").before(connection);
$("sign-in").addEventListener("click", () => signIn());
$("jobs-state").addEventListener("change", () => refreshJobs(true));
$("jobs-refresh").addEventListener("click", () => refreshJobs(true));
$("arrays-refresh").addEventListener("click", refreshArrays);
$("everybody").addEventListener("change", () => { refreshJobs(true); refreshArrays(); });
let typing = 0;
$("search").addEventListener("input", () => {
  clearTimeout(typing);
  typing = setTimeout(refreshArrays, 250);
});
$("search-form").addEventListener("submit", (event) => {
  event.preventDefault();
  refreshArrays();
});
new IntersectionObserver((entries) => {
  jobsSeen = entries.at(-1).isIntersecting;
  if (jobsSeen) refreshJobs();
}).observe($("jobs"));
window.addEventListener("hashchange", route);
onSession((known) => (known ? start() : leave()));
document.addEventListener("visibilitychange", () => {
  // A page that nobody looks at costs the server nothing.
  if (document.hidden) {
    stream?.abort();
    stream = null;
  } else if (!stream && (!wantsKeys || signedIn())) start();
});
reveal(!wantsKeys && Boolean($("devices").firstChild));
if (!wantsKeys) start();
setInterval(followState, STATE_EVERY);
