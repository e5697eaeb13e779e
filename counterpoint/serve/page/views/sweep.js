// A sweep: its targets with state, owner, attempts and result; and, where the sweep's file is known, every target as a line across the
// keys of the grid to its reward (parallel coordinates).
import { fill } from "../shell/api.js";
import { element, setAttribute, setChildren, setText } from "../shell/dom.js";
import { clock, number, seconds, visible, whole } from "../shell/format.js";
import { badge, changeBadge } from "../widgets/badge.js";
import { figures } from "../widgets/figures.js";
import { changeName, nameOf } from "../widgets/name.js";
import { table } from "../widgets/table.js";
import { coordinates } from "./sweep_coordinates.js";

export const title = "Sweep";
export const path = "/jobs/{job}/sweep";
export const key = "x";
export const kinds = ["sweep"];

const TONES = { SUCCESS: "good", RUNNING: "busy", FAILED: "bad", UNREADABLE: "bad", INTERRUPTED: "warn", PENDING: "idle" };

/** Draws the view. */
export function render(root, context) {
  const numbers = figures("Targets by state");
  const note = element("p", { class: "muted", role: "status" });
  const picture = element("div", {});
  const tableBox = element("div", {});
  let shown = null;
  let list = null;
  root.append(element("div", { class: "view-title" }, element("h1", {}, element("bdi", {}, visible(context.parameters.job, 64)))), numbers.element, note, picture, element("section", { class: "section" }, element("h2", {}, "Targets"), tableBox));

  function draw(answer) {
    const counts = new Map();
    for (const target of answer.targets) counts.set(target.state, (counts.get(target.state) ?? 0) + 1);
    const best = answer.targets.reduce((one, target) => (target.reward !== null && (one === null || target.reward > one.reward) ? target : one), null);
    numbers.update([...[...counts].map(([state, count]) => ({ name: state.toLowerCase(), value: whole(count), tone: TONES[state] === "bad" ? "bad" : "" })), ...(best ? [{ name: "Best reward", value: number(best.reward), help: visible(best.target, 100) }] : [])]);
    const notes = [answer.problem, !answer.knows_values && "The folder of a sweep has no values and results of its targets: give the sweep's file to `counterpoint serve` for them.", answer.left_out > 0 && `${whole(answer.left_out)} more targets are left out.`];
    setText(note, visible(notes.filter(Boolean).join(" "), 1000));
    note.hidden = notes.every((text) => !text);
    setChildren(picture, coordinates(answer));
    list ??= makeTable(answer.keys);
    setChildren(tableBox, list.element);
    list.update(answer.targets);
  }

  return {
    async update() {
      const answer = await context.get(fill(path, context.parameters));
      if (answer === shown) return;
      if (list && shown?.keys.join() !== answer.keys.join()) list = null;
      shown = answer;
      draw(answer);
    },
    destroy() {},
  };
}

function makeTable(keys) {
  return table({
    caption: "Targets",
    keyOf: (target) => target.target,
    tone: (target) => (TONES[target.state] === "bad" ? "bad" : target.is_lost ? "warn" : ""),
    empty: "No target yet.",
    columns: [
      { key: "target", title: "Target", value: (target) => target.target, change: changeTarget },
      { key: "state", title: "State", value: (target) => target.state, change: changeState },
      ...keys.map((one, index) => ({ key: `key ${one}`, title: visible(one.split(".").pop(), 24), help: visible(one, 200), number: true, value: (target) => target.numbers[index] ?? target.texts[index], cell: (target) => (target.numbers[index] === null ? visible(target.texts[index], 40) : number(target.numbers[index])) })),
      { key: "reward", title: "Reward", number: true, help: "Mean of the last steps", value: (target) => target.reward, cell: (target) => number(target.reward) },
      { key: "step", title: "Step", number: true, value: (target) => target.runs[0]?.step, cell: (target) => target.runs.map((run) => `${whole(run.step)}/${run.steps === null ? "?" : whole(run.steps)}`).join(" ") },
      { key: "attempts", title: "Attempts", number: true, value: (target) => target.attempts, cell: (target) => whole(target.attempts) },
      { key: "owner", title: "Owner", value: (target) => target.owner, cell: (target) => visible(target.owner, 60) },
      { key: "started", title: "Claimed", number: true, value: (target) => target.started, cell: (target) => clock(target.started) },
      { key: "seconds", title: "Took", number: true, value: (target) => target.seconds, cell: (target) => seconds(target.seconds) },
      { key: "error", title: "Last error", wide: true, value: (target) => target.error, cell: (target) => visible(target.error, 160) },
    ],
  });
}

function changeTarget(cell, target) {
  if (!cell.firstChild) cell.append(nameOf());
  setAttribute(cell, "title", visible(target.target, 200));
  changeName(cell.firstChild, target.target);
}

function changeState(cell, target) {
  if (!cell.firstChild) cell.append(badge(""));
  const text = target.is_lost ? "running, its worker is silent" : target.state.toLowerCase();
  changeBadge(cell.firstChild, text, target.is_lost ? "warn" : (TONES[target.state] ?? "idle"));
}
