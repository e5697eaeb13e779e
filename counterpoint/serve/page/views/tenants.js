// Who uses a job's service for the Tinker SDK: keys with their queue and quotas, sessions, models, samplers, and the ledger.
import { fill } from "../shell/api.js";
import { element, setAttribute, setText } from "../shell/dom.js";
import { ago, bytes, clock, number, visible, whole } from "../shell/format.js";
import { table } from "../widgets/table.js";

export const title = "Tenants";
export const path = "/jobs/{job}/tenants";
export const key = "k";
export const kinds = ["job"];

const NOTHING = "The job has no service for the Tinker SDK, or it has not begun to answer yet.";

/** Nothing, where there is no service. */
function noneYet(error) {
  if (error.status !== 404) throw error;
  return undefined;
}

/** Draws the view. */
export function render(root, context) {
  const note = element("p", { class: "muted note", role: "status" });
  const tables = {
    keys: table({ caption: "Keys", columns: keyColumns(), keyOf: (each) => each.key, empty: "No key has been used yet." }),
    ledger: table({ caption: "Ledger", columns: ledgerColumns(), keyOf: (each) => `${each.day} ${each.key} ${each.project}`, empty: "Nothing has been used yet." }),
    sessions: table({ caption: "Sessions", columns: sessionColumns(), keyOf: (each) => each.session, empty: "No client has come yet." }),
    models: table({ caption: "Models", columns: modelColumns(), keyOf: (each) => each.model, tone: (each) => (each.state.startsWith("waits") ? "warn" : ""), empty: "No model has been made yet." }),
    samplers: table({ caption: "Samplers", columns: samplerColumns(), keyOf: (each) => each.sampler, empty: "No sampler has been made yet." }),
  };
  const names = { keys: "Keys", ledger: "Ledger", sessions: "Newest sessions", models: "Newest models", samplers: "Newest samplers" };
  const body = element("div", { hidden: true }, Object.entries(tables).map(([name, each]) => element("section", { class: "section" }, element("h2", {}, names[name]), each.element)));
  root.append(element("div", { class: "view-title" }, element("h1", {}, element("bdi", {}, visible(context.parameters.job, 64)))), note, body);
  let shown = null; // undefined: there is nothing
  return {
    async update() {
      const answer = await context.get(fill(path, context.parameters)).catch(noneYet);
      if (answer === shown) return;
      shown = answer;
      setAttribute(body, "hidden", !answer);
      setText(note, answer ? `As of ${ago(answer.written, Date.now() / 1000)}` : NOTHING);
      if (answer) for (const [name, each] of Object.entries(tables)) each.update(answer[name]);
    },
    destroy() {},
  };
}

function text(key, heading, limit = 64) {
  return { key, title: heading, value: (each) => each[key], cell: (each) => visible(each[key], limit) };
}

function count(key, heading) {
  return { key, title: heading, number: true, value: (each) => each[key], cell: (each) => whole(each[key]) };
}

/** A number with the quota of it, if there is one. */
function bounded(key, heading, most, shown = whole) {
  return { key, title: heading, number: true, value: (each) => each[key], cell: (each) => (each[most] === null ? shown(each[key]) : `${shown(each[key])} of ${shown(each[most])}`) };
}

function begun(heading) {
  return { key: "created", title: heading, value: (each) => each.created, cell: (each) => clock(each.created) };
}

function keyColumns() {
  return [text("key", "Key"), count("pending", "Requests without a result"), bounded("models", "Models open", "most_models"), bounded("tokens_today", "Tokens today", "most_tokens"), bounded("disk_bytes", "Saved weights", "most_bytes", bytes)];
}

function ledgerColumns() {
  return [
    text("day", "Day (UTC)"), text("key", "Key"), text("project", "Project"),
    count("trained", "Trained"), count("forward", "Forward"), count("prompt", "Prompts"), count("sampled", "Sampled"),
    { key: "seconds", title: "Accelerator", unit: "s", number: true, value: (each) => each.seconds, cell: (each) => number(each.seconds) },
    { key: "cost", title: "Cost", number: true, value: (each) => each.cost, cell: (each) => (each.cost === null ? "–" : number(each.cost)) },
  ];
}

function sessionColumns() {
  return [text("session", "Session"), text("key", "Key"), text("name", "Name", 120), begun("Begun"), { key: "finished", title: "State", value: (each) => each.finished, cell: (each) => (each.finished ? "ended" : "goes on") }];
}

function modelColumns() {
  return [text("model", "Model"), text("key", "Key"), count("rank", "Rank"), begun("Made"), text("state", "State", 200)];
}

function samplerColumns() {
  return [text("sampler", "Sampler"), text("key", "Key"), { ...text("weights", "Weights", 120), cell: (each) => visible(each.weights || "base model", 120) }, count("step", "Update")];
}
