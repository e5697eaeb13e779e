// The inference servers of a job, with whether the runs use each: drain one, give it requests again, add one, take an added one away.
import { fill } from "../shell/api.js";
import { element, setAttribute, setText } from "../shell/dom.js";
import { visible } from "../shell/format.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { field, openDialog, toast } from "../widgets/dialog.js";
import { table } from "../widgets/table.js";
import { sentenceOf } from "./run_actions.js";

const SERVERS = "/jobs/{job}/servers";

/** Makes the list of a job's servers. */
export function serverList(context) {
  const { job } = context.parameters;
  const add = element("button", { type: "button", class: "button small", on: { click: () => addServer() } }, "Add a server…");
  const list = table({ caption: "Servers", columns: columns(post, () => context.mayChange()), keyOf: (server) => server.url, empty: "The job has no server of its own and none was added." });
  const root = element("section", { class: "section", hidden: true }, element("div", { class: "section-head" }, element("h2", {}, "Servers"), element("span", { class: "spacer" }), add), list.element);
  let answer = null;

  async function post(verb, url, done) {
    try {
      show(await context.change(fill(`${SERVERS}/${verb}`, { job }), { url }));
      toast(done);
    } catch (error) {
      toast(sentenceOf(error), "bad");
    }
  }

  function addServer() {
    return openDialog({
      title: "Add a server",
      confirm: "Add",
      body: ["All runs of the job ask it for rollouts from now on. It must serve the same model and read the job's directory.", field({ name: "url", label: "URL", type: "url", required: true, placeholder: "http://gpu3.example:8000", maxlength: 500 })],
      act: async ({ url }) => {
        show(await context.change(fill(`${SERVERS}/add`, { job }), { url }));
        return true;
      },
    });
  }

  function show(next) {
    answer = next;
    setAttribute(root, "hidden", false);
    list.update(answer.servers);
  }

  return {
    element: root,
    /** Gets the list. A job that has none, such as one of another kind, shows none. */
    async update() {
      setAttribute(add, "disabled", !context.mayChange());
      try {
        const next = await context.get(fill(SERVERS, { job }));
        if (next !== answer) show(next);
      } catch (error) {
        if (![400, 404, 409].includes(error.status)) throw error;
        setAttribute(root, "hidden", true);
      }
    },
  };
}

function columns(post, mayChange) {
  return [
    { key: "url", title: "Server", value: (server) => server.url, cell: (server) => visible(server.url, 200) },
    { key: "origin", title: "From", width: 170, value: (server) => (server.origin === "added" ? "added by hand" : "the job's file") },
    { key: "state", title: "State", width: 140, value: stateOf, change: changeState },
    { key: "reason", title: "Reason", value: (server) => server.reason, cell: (server) => visible(server.reason, 200) },
    { key: "act", title: "Actions", width: 220, value: () => "", change: (cell, server) => changeButtons(cell, server, post, mayChange()) },
  ];
}

const TONES = { "in use": "good", "not in use": "bad" };

function stateOf(server) {
  if (server.drained) return "drained";
  return { serving: "in use", out: "not in use" }[server.state] ?? "not in use yet";
}

function changeState(cell, server) {
  if (!cell.firstChild) cell.append(badge(""));
  changeBadge(cell.firstChild, stateOf(server), TONES[stateOf(server)] ?? "busy");
}

function changeButtons(cell, server, post, mayChange) {
  if (!cell.firstChild) {
    const drain = element("button", { type: "button", class: "button small", on: { click: () => (cell.server.drained ? post("undrain", cell.server.url, "The server gets requests again.") : post("drain", cell.server.url, "The server gets no new requests.")) } });
    const remove = element("button", { type: "button", class: "button small", on: { click: () => post("remove", cell.server.url, "The server is taken away.") } }, "Take away");
    cell.append(element("div", { class: "actions" }, drain, remove));
  }
  cell.server = server;
  const [drain, remove] = cell.firstChild.children;
  setText(drain, server.drained ? "Give requests" : "Drain");
  for (const one of [drain, remove]) setAttribute(one, "disabled", !mayChange);
  setAttribute(remove, "hidden", server.origin !== "added");
}
