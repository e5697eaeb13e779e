// A job of roles: its roles and workers, by node or by role, with incarnations and restarts, and what has changed of late, as the
// master's state says.
import { fill } from "../shell/api.js";
import { element, keep, setAttribute, setText } from "../shell/dom.js";
import { ago, clock, visible, whole } from "../shell/format.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { figures } from "../widgets/figures.js";
import { table } from "../widgets/table.js";

export const title = "Cluster";
export const path = "/jobs/{job}/cluster";
export const key = "c";
export const kinds = ["cluster", "job"];

/** The name of every job of runs. */
const UNNAMED = "job";

const TONES = { running: "good", ready: "good", finished: "idle", stopped: "idle", removed: "idle", failed: "bad", stuck: "bad", restarting: "warn", held: "warn", recycling: "warn", stopping: "warn" };

const NOTHING = "The job has no state yet. It has one once its command has begun, after the fine-tuning if there is one.";

/** Nothing, where there is no state. */
function noneYet(error) {
  if (error.status !== 404) throw error;
  return undefined;
}

/** Draws the view. */
export function render(root, context) {
  const name = element("bdi", {}, visible(context.parameters.job, 64));
  const state = badge("");
  const summary = element("span", { class: "muted" });
  const note = element("p", { class: "muted note", role: "status" });
  const numbers = figures("Roles");
  const nodes = element("ul", { class: "nodes" });
  const workers = table({ caption: "Workers", columns: workerColumns(), keyOf: (worker) => worker.worker, tone: toneOf, empty: "No worker yet." });
  const changes = table({ caption: "Newest changes", columns: changeColumns(), keyOf: (change) => change.key, tone: (change) => ({ failed: "bad", stuck: "bad", restarting: "warn" })[change.after] ?? "", empty: "Nothing has changed yet." });
  let shown = null; // undefined: there is nothing
  const body = element("div", { hidden: true }, numbers.element, nodes,
    element("section", { class: "section" }, element("h2", {}, "Workers"), workers.element), element("section", { class: "section" }, element("h2", {}, "Newest changes"), changes.element));
  root.append(element("div", { class: "view-title" }, element("h1", {}, name), state, summary), note, body);

  function draw(answer) {
    setText(name, visible(answer.name && answer.name !== UNNAMED ? answer.name : context.parameters.job, 64));
    changeBadge(state, answer.code === null ? answer.stage.toLowerCase() || "unknown" : answer.code === 0 ? "complete" : `ended with ${answer.code}`, answer.code ? "bad" : undefined);
    setText(summary, `${visible(answer.backend, 60)} · master ${whole(answer.epoch)} · state ${whole(answer.entries)}${answer.written === null ? "" : `, ${ago(answer.written, Date.now() / 1000)}`}${answer.is_complete ? "" : " · reading on"}`);
    const notes = [answer.problem, answer.outcome, answer.set_aside.length > 0 && `Nodes that are used no more: ${answer.set_aside.join(", ")}`].filter(Boolean);
    setText(note, visible(notes.join(" · "), 1500));
    note.hidden = notes.length === 0;
    numbers.update(answer.roles.map((role) => figureOf(role, answer.workers, answer.code !== null)));
    const byNode = new Map();
    for (const worker of answer.workers) if (worker.node) byNode.set(worker.node, (byNode.get(worker.node) ?? 0) + (worker.pid > 0 ? 1 : 0));
    keep(nodes, byNode.size > 1 ? [...byNode].slice(0, 100) : [], ([node]) => node, ([node]) => element("li", {}, element("bdi", {}, visible(node, 64)), element("span", { class: "muted" })), (item, [, count]) => setText(item.lastChild, ` ${whole(count)} processes`));
    workers.update(answer.workers);
    const seen = new Map();
    changes.update(answer.changes.map((change) => withKey(change, seen)));
  }

  return {
    async update() {
      const answer = await context.get(fill(path, context.parameters)).catch(noneYet);
      if (answer === shown) return;
      shown = answer;
      setAttribute(body, "hidden", !answer);
      setAttribute(state, "hidden", !answer);
      if (answer) draw(answer);
      else setText(note, NOTHING);
    },
    destroy() {},
  };
}

function figureOf(role, workers, hasEnded) {
  const own = workers.filter((worker) => worker.role === role.role && worker.rank >= 0);
  const ready = own.filter((worker) => ["running", "ready", "finished", "starting"].includes(worker.phase)).length;
  const restarts = own.reduce((sum, worker) => sum + worker.restarts, 0);
  return { name: visible(role.role, 30), value: `${whole(ready)} / ${whole(role.wanted)}`, unit: restarts > 0 ? `${whole(restarts)} ${restarts === 1 ? "restart" : "restarts"}` : "", tone: own.some((worker) => worker.phase === "failed") ? "bad" : ready < role.wanted && !hasEnded ? "warn" : "", help: role.is_task ? "A task: the job is over when all tasks have ended" : "A service" };
}

function toneOf(worker) {
  if (worker.phase === "failed" || worker.phase === "stuck") return "bad";
  return worker.trouble || worker.is_suspected ? "warn" : "";
}

function workerColumns() {
  return [
    { key: "worker", title: "Worker", value: (worker) => worker.worker, cell: (worker) => visible(worker.worker, 64) },
    { key: "phase", title: "State", value: (worker) => worker.phase, change: changePhase },
    { key: "node", title: "Node", value: (worker) => worker.node, cell: (worker) => visible(worker.node, 48) },
    { key: "pid", title: "Process", number: true, value: (worker) => worker.pid || null, cell: (worker) => (worker.pid ? String(worker.pid) : "–") },
    { key: "incarnation", title: "Incarnation", number: true, help: "How often it was created", value: (worker) => worker.incarnation, cell: (worker) => whole(worker.incarnation) },
    { key: "restarts", title: "Restarts", number: true, value: (worker) => worker.restarts, cell: (worker) => whole(worker.restarts) },
    { key: "status", title: "Says", value: (worker) => worker.status, cell: (worker) => visible(worker.trouble || worker.status, 120) },
    { key: "death", title: "Last death", value: (worker) => worker.last_death, cell: (worker) => visible(worker.last_death, 160) },
  ];
}

function changePhase(cell, worker) {
  if (!cell.firstChild) cell.append(badge(""));
  changeBadge(cell.firstChild, worker.is_suspected ? `${worker.phase}, silent` : worker.phase, worker.is_suspected ? "warn" : (TONES[worker.phase] ?? "busy"));
}

function changeColumns() {
  return [
    { key: "time", title: "When", width: 150, value: (change) => change.time, cell: (change) => clock(change.time) },
    { key: "worker", title: "Worker", width: 180, value: (change) => change.worker, cell: (change) => visible(change.worker || "the job", 48) },
    { key: "after", title: "Change", width: 210, value: (change) => change.after, cell: (change) => visible(change.before ? `${change.before} → ${change.after}` : change.after, 60).toLowerCase() },
    { key: "incarnation", title: "Incarnation", width: 96, number: true, value: (change) => change.incarnation, cell: (change) => (change.worker ? whole(change.incarnation) : "–") },
    { key: "cause", title: "Event", width: 150, value: (change) => change.cause, cell: (change) => visible(change.cause, 40) },
    { key: "reason", title: "Reason", value: (change) => change.reason, cell: (change) => visible(change.reason, 200) },
  ];
}

/** Adds a key that no other change has. */
function withKey(change, seen) {
  const base = `${change.time} ${change.worker} ${change.before} ${change.after} ${change.incarnation}`;
  const count = (seen.get(base) ?? 0) + 1;
  seen.set(base, count);
  return { ...change, key: `${base} ${count}` };
}
