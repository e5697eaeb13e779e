// The inference servers of a job, with whether the runs use each: drain one, give it requests again, add one, take an added one away.
import { fill } from "../shell/api.js";
import { element, setAttribute } from "../shell/dom.js";
import { visible } from "../shell/format.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { field, toast } from "../widgets/dialog.js";
import { table } from "../widgets/table.js";
import { isOffered, orNote, perform, verbButton } from "./verbs.js";

const SERVERS = "/jobs/{job}/servers";

/** Makes the list of a job's servers. */
export function serverList(context) {
  const { job } = context.parameters;
  const list = table({ caption: "Servers", isStacked: true, columns: columns(() => isLive, (cell, server) => changeButtons(cell, server)), keyOf: (server) => server.url, empty: "The job has no server of its own and none was added." });
  const head = element("div", { class: "section-head" }, element("h2", {}, "Servers"), element("span", { class: "spacer" }));
  const root = element("section", { class: "section", hidden: true }, head, list.element);
  let verbs = null;
  let add = null;
  let answer = null;
  let isLive = false;

  async function send(verb, url) {
    show(await context.change(fill(`${SERVERS}/${verb.name}`, { job }), { url }));
    toast(verb.explanation);
    return true;
  }

  /** Adds a server, whose URL is asked for. */
  function addServer(verb) {
    const asked = { ...verb, fields: {} };
    const url = field({ name: "url", label: "URL", type: "url", required: true, placeholder: "http://gpu3.example:8000", maxlength: verb.fields.url.maxLength });
    return perform(asked, verb.label, (values) => send(verb, values.url), [url]);
  }

  /** Gets the verbs, once. The one that names a server anew stands above the list, the others in the rows. */
  async function load() {
    if (verbs) return;
    const { servers } = await context.get("/verbs");
    verbs = servers.filter((verb) => !verb.asks_first);
    const adding = servers.find((verb) => verb.asks_first);
    add = verbButton(adding, () => addServer(adding));
    head.append(add);
  }

  function changeButtons(cell, server) {
    if (!cell.firstChild) {
      cell.append(element("div", { class: "actions" }, verbs.map((verb) => verbButton(verb, () => orNote(() => send(verb, cell.server.url))))));
    }
    cell.server = server;
    for (const [index, verb] of verbs.entries()) {
      setAttribute(cell.firstChild.children[index], "disabled", !context.mayChange());
      setAttribute(cell.firstChild.children[index], "hidden", !isLive || !isOffered(verb, [server.drained ? "drained" : "not drained", server.origin]));
    }
  }

  function show(next) {
    answer = next;
    setAttribute(root, "hidden", false);
    list.update(answer.servers);
  }

  return {
    element: root,
    /** Gets the list; the buttons are those of a job that runs. A job that has none, such as one of another kind, shows none. */
    async update(isRunning) {
      await load();
      setAttribute(add, "disabled", !context.mayChange());
      setAttribute(add, "hidden", !isRunning);
      try {
        const next = await context.get(fill(SERVERS, { job }));
        const isOther = isLive !== isRunning;
        isLive = isRunning;
        root.dataset.live = String(isLive);
        if (next !== answer || isOther) show(next);
      } catch (error) {
        if (![400, 404, 409].includes(error.status)) throw error;
        setAttribute(root, "hidden", true);
      }
    },
  };
}

function columns(isLive, changeButtons) {
  return [
    { key: "url", title: "Server", value: (server) => server.url, cell: (server) => visible(server.url, 200) },
    { key: "origin", title: "From", width: 170, value: (server) => (server.origin === "added" ? "added by hand" : "the job's file") },
    { key: "state", title: "State", width: 140, value: (server) => stateOf(server, isLive()), change: (cell, server) => changeState(cell, stateOf(server, isLive())) },
    { key: "reason", title: "Reason", value: (server) => server.reason, cell: (server) => (isLive() ? visible(server.reason, 200) : "") },
    { key: "act", title: "Actions", width: 220, value: () => "", change: changeButtons },
  ];
}

const TONES = { "in use": "good", "not in use": "bad", stopped: "idle" };

/** What the runs make of a server. Once no job runs, nothing will use one that is not in use. */
function stateOf(server, isLive) {
  if (server.drained) return "drained";
  return { serving: "in use", out: "not in use" }[server.state] ?? (isLive ? "not in use yet" : "stopped");
}

function changeState(cell, state) {
  if (!cell.firstChild) cell.append(badge(""));
  changeBadge(cell.firstChild, state, TONES[state] ?? "busy");
}
