// Jobs: a list of the newest, and a view of one: phases as a bar, steps, results, why it failed.

import { h, moment, morph, morphChildren, openDialog, pill, problemText, shortId, svg, table } from "./dom.js";
import { ago, count, seconds, short } from "./format.js";
import { api, apiOfAnybody, root } from "./session.js";

const KINDS = { succeeded: "ok", running: "", queued: "", failed: "bad", expired: "bad", cancelled: "warn" };
const SHOWN = 15;
const FINAL = new Set(["succeeded", "failed", "cancelled", "expired"]);
const PHASES = [
  ["queue_s", "waiting"], ["compile_s", "compiling"], ["h2d_s", "to the device"], ["kernel_s", "computing"],
  ["d2h_s", "from the device"], ["verify_s", "checking"],
];

const unix = (text) => (text ? Date.parse(text) / 1000 : null);
const took = (job) => (job.finished_at ? unix(job.finished_at) - unix(job.created_at) : null);

function what(job) {
  const named = job.request?.name;
  return `${job.op}${named ? `: ${named}` : ""}`;
}

/** Fills `place` with the newest jobs; `query`: of GET /v1/jobs. */
export async function showJobs(place, query, signal) {
  const { items } = await (await api(`v1/jobs?${new URLSearchParams({ limit: String(SHOWN), ...query })}`, { signal })).json();
  const now = Date.now() / 1000;
  const columns = [["Job", ""], ["What", ""], ["State", ""], ["Submitted", ""], ["Took", "number"]];
  const shown = items.length
    ? table("Newest jobs", columns, items.map((job) => [
      h("a", { href: `#${job.id}` }, shortId(job.id)), what(job), pill(job.state, KINDS[job.state] ?? ""),
      moment(unix(job.created_at), ago(unix(job.created_at), now)), seconds(took(job)),
    ]))
    : h("p", { class: "muted" }, "None.");
  const more = items.length === SHOWN && h("p", { class: "muted" }, `The newest ${SHOWN}; 'gemmserve jobs' lists more.`);
  morphChildren(place, [shown, more].filter(Boolean));
}

/** Phases of a job as one bar, with what each took beside it in words. */
function phases(job) {
  const known = PHASES.map(([field, name]) => [name, job.timings?.[field] ?? 0]).filter(([, time]) => time > 0);
  const whole = took(job);
  const sum = known.reduce((total, [, time]) => total + time, 0);
  if (whole !== null && whole - sum > 1e-4) known.push(["everything else", whole - sum]);
  if (!known.length) return null;
  const total = known.reduce((all, [, time]) => all + time, 0);
  let at = 0;
  const parts = known.map(([name, time], index) => {
    const part = svg("rect", { class: `phase-${index}`, x: `${(at / total) * 100}%`, width: `${(time / total) * 100}%`, height: "20" },
      svg("title", {}, `${name}: ${seconds(time)}`));
    at += time;
    return part;
  });
  const label = `phases: ${known.map(([name, time]) => `${name} ${seconds(time)}`).join(", ")}`;
  return h("div", {},
    svg("svg", { class: "phases", role: "img", "aria-label": label, width: "100%", height: "20" }, parts),
    h("ul", { class: "legend" }, known.map(([name, time], index) => h("li", {},
      svg("svg", { class: "swatch", width: "12", height: "12", "aria-hidden": "true" }, svg("rect", { class: `phase-${index}`, width: "12", height: "12", rx: "2" })),
      name, " ", h("span", { class: "muted" }, seconds(time))))));
}

function facts(job) {
  const rows = [
    ["Id", h("code", {}, job.id)],
    ["Submitted", moment(unix(job.created_at), new Date(job.created_at).toLocaleString())],
    ["Took", job.finished_at ? seconds(took(job)) : null],
    ["Attempts", job.attempt > 1 ? count(job.attempt) : null],
    ["Algorithm", job.algorithm],
    ["Checked", job.residual === null ? null : `relative error ${short(job.residual)}`],
    ["Computed again", job.mismatch === null ? null : `a first result was off by ${short(job.mismatch)}`],
  ];
  return h("dl", { class: "facts" }, rows.filter(([, value]) => value).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

function steps(job) {
  if (!job.steps?.length) return null;
  const columns = [["Step", ""], ["Algorithm", ""], ["Time", "number"], ["Residual", "number"]];
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Steps" }, table("Steps", columns, job.steps.map((step) => [
    step.id, step.algorithm, seconds(step.kernel_s), short(step.residual),
  ])));
}

function bodyOf(job) {
  const results = Object.entries(job.result ?? {});
  return h("div", {},
    h("p", {}, pill(job.compiling ? "compiling" : job.state, KINDS[job.state] ?? ""), " ", what(job),
      job.state === "running" && job.estimated_s ? h("span", { class: "muted" }, ` about ${seconds(job.estimated_s)}`) : "",
      job.state === "running" && job.progress ? h("span", {}, ` ${Math.round(100 * job.progress)} % done`) : ""),
    job.error ? problemText(job.error, root) : null,
    phases(job), steps(job),
    results.length ? h("div", {}, h("h3", {}, "Results"), h("ul", { class: "plain" }, results.map(([name, id]) =>
      h("li", {}, `${name}: `, h("a", { href: `#${id}` }, id))))) : null,
    facts(job));
}

/** Opens the view of a job, which follows it until it is final. */
export function openJob(id, closed) {
  const controller = new AbortController();
  const place = h("div", { "aria-live": "polite" }, h("p", { class: "muted" }, "…"));
  const box = openDialog("Job", place, {
    wide: true,
    closed: () => {
      controller.abort();
      closed();
    },
  });
  follow();
  return box;

  async function follow() {
    try {
      for (let wait = 0; ; ) {
        const asked = performance.now();
        const job = await (await apiOfAnybody(`v1/jobs/${id}?wait=${wait}`, { signal: controller.signal })).json();
        if (place.firstChild) morph(place.firstChild, bodyOf(job));
        if (FINAL.has(job.state)) return;
        wait = job.progress ? 2 : 20; // one that gets on is seen to
        // A server that caps the wait would be asked without a pause.
        if (wait && performance.now() - asked < 1000) await new Promise((resolve) => setTimeout(resolve, 1000));
      }
    } catch (error) {
      if (error.name !== "AbortError") place.replaceChildren(problemText(error, root));
    }
  }
}
