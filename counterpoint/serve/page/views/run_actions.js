// The buttons that change a run: one for each verb of the server's table. Each asks before it acts, says what will happen, and shows the
// server's answer or refusal. The server does what the command line would do (`counterpoint pause`, `stop`, ...).
import { fill } from "../shell/api.js";
import { element, setAttribute, setChildren, setText } from "../shell/dom.js";
import { clock, visible } from "../shell/format.js";
import { changeDialog } from "./change_dialog.js";
import { path as profiles } from "./profile.js";
import { inBackground, isOffered, orNote, perform, verbButton } from "./verbs.js";

const RUN = "/jobs/{job}/runs/{run}";
const SPARE_SECONDS = 30;

/**
 * Makes the buttons; `update` takes the run as `/jobs/{job}/runs/{run}` has it, and whether a process could do what is asked, once
 * `load` has ended.
 */
export function runActions(context) {
  const { job, run } = context.parameters;
  const name = visible(run, 64);
  const paused = element("span", { class: "muted" });
  const root = element("div", { class: "actions", role: "group", "aria-label": `Actions on run ${name}`, hidden: true }, paused);
  let buttons = null;
  let askedFor = null;

  /** What a note shows behind a verb's answer. */
  const links = { profile: (answer) => element("a", { href: context.link(profiles, { job, run }, { profile: answer.name }) }, "See its flame graph") };

  /** Posts to the run; what takes longer than a moment goes on in the background, and its end is told. */
  function post(verb, values) {
    const body = verb.has_request_id ? { ...values, request_id: newId() } : values;
    const seconds = verb.wait_seconds + (values.seconds ?? 0) + SPARE_SECONDS;
    return inBackground(context.change(fill(`${RUN}/${verb.name}`, { job, run }), body, seconds), verb, links[verb.name]);
  }

  function act(verb) {
    if (verb.name === "change") return orNote(() => change(verb));
    return perform(verb, `${verb.label} ${name}?`, (values) => post(verb, values));
  }

  /** Which keys may change is asked for when somebody wants to change one: the server reads much to know it. */
  async function change(verb) {
    return changeDialog(context, verb, await context.get(fill(`${RUN}/control`, { job, run })), (values) => post(verb, values));
  }

  /** Says since when and why the run is paused. */
  async function tellPause() {
    const { paused: note } = await context.get(fill(`${RUN}/control`, { job, run }));
    setText(paused, note ? `paused since ${clock(note.since)}${note.reason ? `: ${visible(note.reason, 80)}` : ""}` : "");
  }

  return {
    element: root,
    /** Gets the verbs, once. */
    async load() {
      if (buttons) return;
      const { runs } = await context.get("/verbs");
      buttons = runs.map((verb) => ({ verb, node: verbButton(verb, () => act(verb)) }));
      setChildren(root, paused, buttons.map(({ node }) => node));
    },
    update(found, isLive) {
      const mayChange = context.mayChange();
      setAttribute(root, "hidden", false);
      for (const { verb, node } of buttons) {
        setAttribute(node, "disabled", !mayChange);
        setAttribute(node, "hidden", !isLive || !isOffered(verb, [found.paused ? "paused" : "not paused"]));
      }
      setAttribute(root, "title", mayChange ? null : "This token may only look. Use the admin token to change anything.");
      if (askedFor !== found.paused && found.paused) tellPause().catch(() => setText(paused, "paused"));
      if (!found.paused) setText(paused, "");
      askedFor = found.paused;
    },
  };
}

/** A new id for a request, so that asking again after a lost answer does nothing twice. Later ids sort behind earlier ones. */
function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(6));
  return `${Date.now()}000000-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
