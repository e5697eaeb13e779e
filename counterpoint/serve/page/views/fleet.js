// The fleet of a job: its servers as all runs see them together, their queues and rates, and the trainer's runs and slots.
import { fill } from "../shell/api.js";
import { element, keep, setAttribute, setChildren, setText } from "../shell/dom.js";
import { ago, clock, number, percent, visible, whole } from "../shell/format.js";
import { WORDS } from "../shell/words.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { figures } from "../widgets/figures.js";
import { table } from "../widgets/table.js";

export const title = "Fleet";
export const path = "/jobs/{job}/fleet";
export const key = "f";
export const kinds = ["job"];

const FLEET = "/jobs/{job}/fleet";
const TONES = { serving: "good", loading: "busy", draining: "busy", unknown: "idle", out: "bad" };

/** Draws the view. */
export function render(root, context) {
  const totals = figures("The fleet in numbers");
  const note = element("p", { class: "empty" }, "Reading what the runs say of their servers.");
  const servers = table({ caption: "Servers", isStacked: true, columns: serverColumns(() => answer.current), keyOf: (server) => server.url, tone: (server) => (answer.current && server.state === "out" ? "bad" : ""), empty: "No orchestrator has told of a server yet." });
  const trainer = element("p", { class: "muted" });
  const runs = table({ caption: "Runs at the trainer", isStacked: true, columns: runColumns(), keyOf: (run) => run.run, tone: (run) => (run.stage === "evicted" || run.stage === "refused" ? "bad" : ""), empty: "The trainer has told of no run yet." });
  let answer = null;
  root.append(
    element("div", { class: "view-title" }, element("h1", {}, "Fleet of ", element("bdi", {}, visible(context.parameters.job, 64))), element("span", { class: "muted" }, "the inference servers and the trainer, which the job's runs share")),
    totals.element,
    note,
    servers.element,
    element("section", { class: "section" }, element("div", { class: "section-head" }, element("h2", {}, "Trainer"), trainer), runs.element),
  );

  function draw() {
    const serving = answer.servers.filter((server) => server.state === "serving").length;
    totals.update([
      { name: "Servers", value: `${whole(serving)} of ${whole(answer.servers.length)}`, unit: "serve", tone: answer.current && serving < answer.servers.length ? "warn" : "" },
      { name: "Requests", value: whole(sum(answer.servers, "in_flight")), unit: `of ${whole(answer.capacity)}`, help: "At the servers, of what they may have at once" },
      { name: "Waiting", value: whole(answer.waiting), help: "Requests that no server has room for" },
      { name: "Last 30 s", value: number(sum(answer.servers, "tokens_per_second"), 3), unit: "tokens/s", help: "Completion tokens that the servers made for all runs in the last 30 s; a run's own figure is over its newest ten steps" },
      { name: "Restarts", value: whole(sum(answer.servers, "restarts")), tone: sum(answer.servers, "restarts") ? "warn" : "" },
    ]);
    setAttribute(note, "hidden", answer.current);
    setText(note, answer.time === null ? "No orchestrator has told of its servers yet." : `No orchestrator runs now. This is how things were at ${clock(answer.time)}.`);
    servers.update(answer.servers);
    const told = answer.trainer;
    setText(trainer, told ? `${whole(told.runs.filter((run) => run.slot !== null).length)} of ${whole(told.slots)} slots are taken${told.ended ? "; it has ended" : `; told at ${clock(told.time)}`}` : "No trainer has run here.");
    runs.update(told?.runs ?? []);
  }

  return {
    async update() {
      const next = await context.get(fill(FLEET, context.parameters));
      if (next === answer) return;
      answer = next;
      draw();
    },
    destroy: () => {},
  };
}

/** The columns of the servers. Of a job that has ended (`isCurrent` says no) no state is an alarm. */
function serverColumns(isCurrent) {
  return [
    { key: "url", title: "Server", value: (server) => server.url, cell: (server) => element("bdi", { class: "mono" }, visible(server.url, 120)) },
    { key: "state", title: "State", help: "It serves once it is proven to have the run's weights", value: (server) => server.state, change: (cell, server) => changeState(cell, server.state, isCurrent() ? TONES[server.state] : "idle") },
    { key: "versions", title: "Version", help: "The policy version that it holds, of each run", value: (server) => Math.max(-1, ...server.views.map((view) => view.version ?? -1)), change: changeVersions },
    { key: "in_flight", title: "Requests", number: true, value: (server) => server.in_flight, cell: (server) => `${whole(server.in_flight)} / ${whole(server.limit)}` },
    { key: "queue", title: "Queue", number: true, help: "Requests that wait within the server", value: (server) => server.engine?.waiting, cell: (server) => whole(server.engine?.waiting) },
    { key: "cache", title: "KV cache", number: true, value: (server) => server.engine?.cache_use, cell: (server) => percent(server.engine?.cache_use) },
    { key: "rate", title: "Tokens/s", number: true, value: (server) => server.tokens_per_second, cell: (server) => number(server.tokens_per_second, 3) },
    { key: "hits", title: "Cache hits", number: true, help: "Share of the prompts' tokens that its prefix cache had", value: (server) => server.cache_hit_share, cell: (server) => percent(server.cache_hit_share) },
    { key: "failures", title: "Failed", number: true, help: "Requests that failed there", value: (server) => server.failures, cell: (server) => whole(server.failures) },
    { key: "restarts", title: "Restarts", number: true, value: (server) => server.restarts, cell: (server) => whole(server.restarts) },
    { key: "why", title: "Why out of service", wide: true, value: (server) => server.reason || outageOf(server) },
  ];
}

function changeState(cell, state, tone) {
  if (!cell.firstChild) cell.append(badge(""));
  changeBadge(cell.firstChild, state, tone);
}

/** One version if all runs have the same or there is one run; else one of each run. */
function changeVersions(cell, server) {
  const versions = server.views.map((view) => (view.version === null ? "–" : String(view.version)));
  const isOne = new Set(versions).size <= 1;
  if (isOne) return setChildren(cell, versions[0] ?? "–");
  if (cell.firstChild?.tagName !== "UL") setChildren(cell, element("ul", { class: "versions" }));
  keep(cell.firstChild, server.views.slice(0, 8), (view) => view.run, () => element("li", {}), (node, view) => setText(node, `${visible(view.run, 24)} ${view.version ?? "–"}`));
}

function outageOf(server) {
  if (!server.last_outage || !server.outages) return "";
  return `serves again; was out ${ago(server.last_outage.time, Date.now() / 1000)}: ${visible(server.last_outage.reason, 160)}`;
}

function runColumns() {
  return [
    { key: "run", title: "Run", value: (run) => run.run, cell: (run) => element("bdi", {}, visible(run.run, 64)) },
    { key: "stage", title: "Stage", help: "Where the run is in its life at the trainer; an evicted one was ended for good", value: (run) => run.stage, change: (cell, run) => changeState(cell, run.stage) },
    { key: "slot", title: "Slot", number: true, help: "Its place at the trainer, which trains so many runs at once", value: (run) => run.slot, cell: (run) => whole(run.slot) },
    { key: "step", title: "Trained", number: true, value: (run) => run.step, cell: (run) => `${whole(run.step)} / ${whole(run.steps)}` },
    { key: "open", title: "In training", number: true, value: (run) => run.open_step, cell: (run) => whole(run.open_step) },
    { key: "waiting", title: "Batches waiting", number: true, value: (run) => run.batches_waiting, cell: (run) => whole(run.batches_waiting) },
    { key: "durable", title: "Durable", number: true, help: WORDS.durable, value: (run) => run.durable_step, cell: (run) => whole(run.durable_step) },
    { key: "connected", title: "Orchestrator", value: (run) => (run.connected ? "connected" : "away") },
    { key: "why", title: "Why not trained", wide: true, value: (run) => visible(run.reason || "–", 300) },
  ];
}

function sum(items, name) {
  const found = items.map((item) => item[name]).filter((value) => typeof value === "number");
  return found.length ? found.reduce((total, value) => total + value, 0) : null;
}
