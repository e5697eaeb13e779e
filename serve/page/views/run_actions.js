// The buttons that change a run. Each asks before it acts, says what will happen, and shows the server's answer or refusal. The server
// does what the command line would do (`counterpoint pause`, `stop`, ...).
import { fill } from "../shell/api.js";
import { element, setAttribute, setChildren, setText } from "../shell/dom.js";
import { clock, visible, whole } from "../shell/format.js";
import { field, openDialog, toast } from "../widgets/dialog.js";
import { changeDialog } from "./change_dialog.js";
import { path as profiles } from "./profile.js";

const RUN = "/jobs/{job}/runs/{run}";
const SOON_MILLISECONDS = 2500;

/** Makes the buttons; `update` takes the run as `/jobs/{job}/runs/{run}` has it. */
export function runActions(context) {
  const { job, run } = context.parameters;
  const name = visible(run, 64);
  let isPaused = false;
  let askedFor = null;
  const buttons = {
    pause: button("Pause…", "Starts no new rollouts until it is resumed", () => (isPaused ? resume() : pause())),
    change: button("Change…", "Changes keys of the configuration from the next step on", () => change()),
    checkpoint: button("Checkpoint", "Makes the newest step durable now, and keeps it", () => checkpoint()),
    dump: button("Dump", "Writes the next step in full, for replay", () => dump()),
    profile: button("Profile", "Samples the orchestrator's event loop", () => profile()),
    stop: button("Stop…", "Ends the run in order; it can be resumed", () => stop()),
    evict: button("Evict…", "Ends the run for good", () => evict()),
  };
  const paused = element("span", { class: "muted" });
  const root = element("div", { class: "actions", role: "group", "aria-label": `Actions on run ${name}` }, paused, Object.values(buttons));

  /** Posts to the run; what takes longer than a moment goes on in the background, and its end is told. */
  function post(verb, body, seconds, done) {
    return inBackground(context.change(fill(`${RUN}/${verb}`, { job, run }), body, seconds + 15), verb, done);
  }

  /** Which keys may change is asked for when somebody wants to change one: the server reads much to know it. */
  async function change() {
    try {
      await changeDialog(context, await context.get(fill(`${RUN}/control`, { job, run })), post);
    } catch (error) {
      toast(sentenceOf(error), "bad");
    }
  }

  /** Says since when and why the run is paused. */
  async function tellPause() {
    const { paused: note } = await context.get(fill(`${RUN}/control`, { job, run }));
    setText(paused, note ? `paused since ${clock(note.since)}${note.reason ? `: ${visible(note.reason, 80)}` : ""}` : "");
  }

  function pause() {
    return openDialog({
      title: `Pause ${name}?`,
      confirm: "Pause",
      body: ["Rollouts that are under way finish and are trained. No new ones start until you resume the run; its servers and its trainer go on for the others.", field({ name: "reason", label: "Reason (optional)", maxlength: 1000, help: "Shown with the run." })],
      act: ({ reason }) => post("pause", { reason, request_id: newId() }, 30, () => `${name} is paused.`),
    });
  }

  function resume() {
    return act("resume", { request_id: newId() }, 30, () => `${name} goes on.`);
  }

  function checkpoint() {
    return openDialog({
      title: `Checkpoint ${name} now?`,
      confirm: "Checkpoint",
      body: "The trainer makes the newest step durable at once, and keeps that checkpoint until you remove it. Training goes on meanwhile.",
      act: () => post("checkpoint", { request_id: newId() }, 300, (answer) => `Step ${whole(answer.step)} is durable in ${visible(answer.directory, 200)}.`),
    });
  }

  function dump() {
    return openDialog({
      title: `Dump the next step of ${name}?`,
      confirm: "Dump",
      body: "The next step is written in full when it is complete, for `counterpoint replay`. This may take as long as a step takes.",
      act: () => post("dump", { request_id: newId() }, 300, (answer) => `Step ${whole(answer.step)} is dumped in ${visible(answer.directory, 200)}.`),
    });
  }

  function profile() {
    return openDialog({
      title: `Profile the loop of ${name}`,
      confirm: "Profile",
      body: ["Samples what the orchestrator's event loop does. The run goes on.", field({ name: "seconds", label: "Seconds", type: "number", value: "10", min: 1, max: 300, required: true })],
      act: ({ seconds }) => post("profile", { seconds: Number(seconds), request_id: newId() }, Number(seconds) + 30, (answer) => [`The profile of ${whole(answer.seconds)} s is in ${visible(answer.collapsed, 200)}.`, flameGraphOf(answer)]),
    });
  }

  function flameGraphOf(answer) {
    return element("a", { href: context.link(profiles, { job, run }, { profile: answer.name }) }, "See its flame graph");
  }

  function stop() {
    return openDialog({
      title: `Stop ${name}?`,
      confirm: "Stop the run",
      tone: "danger",
      body: "The run finishes what is under way, writes a checkpoint and ends. Start the job again with --resume to continue it. The other runs go on; when the last run ends, so does the job.",
      act: () => post("stop", {}, 30, (answer) => (answer.has_ended ? `${name} has ended at step ${visible(answer.progress, 40)}.` : `${name} is stopping.`)),
    });
  }

  function evict() {
    return openDialog({
      title: `Evict ${name}?`,
      confirm: "Evict the run",
      tone: "danger",
      body: ["The run ends and stays away, also after --resume, until somebody removes its control/evicted.txt.", field({ name: "reason", label: "Reason", maxlength: 1000, required: true, help: "Shown with the run, and kept in its directory." })],
      act: ({ reason }) => post("evict", { reason }, 30, () => `${name} is evicted.`),
    });
  }

  async function act(verb, body, seconds, done) {
    try {
      await post(verb, body, seconds, done);
    } catch (error) {
      toast(sentenceOf(error), "bad");
    }
  }

  return {
    element: root,
    update(found) {
      const mayChange = context.mayChange();
      setAttribute(root, "hidden", found.state === "done");
      for (const one of Object.values(buttons)) setAttribute(one, "disabled", !mayChange);
      setAttribute(root, "title", mayChange ? null : "This token may only look. Use the admin token to change anything.");
      isPaused = found.paused;
      setChildren(buttons.pause, isPaused ? "Resume" : "Pause…");
      setAttribute(buttons.pause, "title", isPaused ? "Lets the run go on" : "Starts no new rollouts until it is resumed");
      if (askedFor !== isPaused && isPaused) tellPause().catch(() => setText(paused, "paused"));
      if (!isPaused) setText(paused, "");
      askedFor = isPaused;
    },
  };
}

/**
 * Waits a moment for a change. If it has not ended by then, the dialog may close: the end is told by a note.
 *
 * `done` returns the note's text, or that and a link. Throws what the server refused within the moment.
 */
export async function inBackground(request, verb, done) {
  let isSoon = true;
  const told = request.then(
    (answer) => {
      const [text, more] = [done(answer)].flat();
      toast(text, "good", more);
      return answer;
    },
    (error) => {
      if (isSoon) throw error;
      toast(`${verb}: ${sentenceOf(error)}`, "bad");
      return null;
    },
  );
  const later = new Promise((resolve) => setTimeout(() => resolve(LATER), SOON_MILLISECONDS));
  const first = await Promise.race([told, later]);
  if (first !== LATER) return first;
  isSoon = false;
  toast(`Asked for: ${verb}. Its end will be told here.`);
  return true;
}

const LATER = Symbol("later");

/** What a refusal says, as one sentence. */
export function sentenceOf(error) {
  const { what, expected, advice } = error.problem ?? { what: error.message };
  return [what, expected && `expected ${expected}`, advice].filter(Boolean).join("; ");
}

/** A new id for a request, so that asking again after a lost answer does nothing twice. Later ids sort behind earlier ones. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(6));
  return `${Date.now()}000000-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

function button(text, help, onClick) {
  return element("button", { type: "button", class: "button small", title: help, disabled: true, on: { click: onClick } }, text);
}
