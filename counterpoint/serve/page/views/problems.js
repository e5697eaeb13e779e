// The list of what is wrong: where, why, since when, and what to do about it. It is on top of the overview and of each run.
import { element, keep, setAttribute, setChildren, setText } from "../shell/dom.js";
import { ago, passage, visible, whole } from "../shell/format.js";
import { changeName, nameOf } from "../widgets/name.js";

const SHOWN = 12;
/** Runs with the same problem that are named. */
const OTHERS = 40;
const ROLLOUTS = "/jobs/{job}/runs/{run}/rollouts";
/** Kinds of problems of which rollouts show more. */
const OF_ROLLOUTS = ["no-difference", "nothing-ships", "failing-environment", "cut", "held-out", "repeated", "few-differences"];
const TONES = { error: "bad", warning: "warn" };
const NAMES = { error: "Error", warning: "Warning" };

/** Makes the list; `update` takes the problems, the worst first, the time now, and how many more there are. */
export function problemList(context, { isOfOneRun = false } = {}) {
  const list = element("ul", { class: "problems", "aria-label": "Problems" });
  const well = element("p", { class: "all-well", hidden: true }, element("span", { class: "dot", "aria-hidden": "true", dataset: { tone: "good" } }), "No problems.");
  const more = element("button", { type: "button", class: "button small", hidden: true, on: { click: () => { all = true; draw(); } } });
  const rest = element("p", { class: "muted" });
  let problems = null;
  let now = 0;
  let unlisted = 0;
  let all = false;

  function draw() {
    const groups = alike(problems);
    const shown = all ? groups.slice(0, 500) : groups.slice(0, SHOWN);
    keep(list, shown, keyOf, make, change);
    setAttribute(list, "hidden", problems.length === 0);
    setAttribute(well, "hidden", isOfOneRun || problems.length > 0);
    setAttribute(more, "hidden", shown.length === groups.length);
    setText(more, `Show ${whole(groups.length - shown.length)} more`);
    setText(rest, unlisted > 0 ? `and ${whole(unlisted)} more that are not listed` : "");
  }

  function make(problem) {
    const where = isOfOneRun ? element("span", {}) : element("a", { class: "problem-where" }, nameOf());
    return element("li", { class: "problem" }, where, element("span", { class: "problem-reason" }, element("bdi", {})), element("span", { class: "problem-since" }), element("span", { class: "problem-advice" }, element("span", {}), element("a", { hidden: true }, "See its worst rollouts")), element("span", { class: "problem-others" }));
  }

  function change(node, problem) {
    const [where, reason, since, advice, others] = node.children;
    setAttribute(node, "data-tone", TONES[problem.severity] ?? "warn");
    if (!isOfOneRun) {
      setAttribute(where, "href", hrefOf(problem));
      changeName(where.firstChild, problem.run || problem.job);
    } else setText(where, NAMES[problem.severity] ?? "");
    setText(reason.firstChild, passage(problem.reason, 600));
    setText(since, problem.since ? ago(problem.since, now) : "");
    setText(advice.firstChild, `${passage(problem.advice ?? "", 600)} `);
    setAttribute(advice.lastChild, "hidden", !problem.run || !OF_ROLLOUTS.includes(problem.kind));
    if (problem.run) setAttribute(advice.lastChild, "href", context.link(ROLLOUTS, problem, { sort: "worst" }));
    setAttribute(others, "hidden", problem.others.length === 0);
    setChildren(others, problem.others.length > 0 ? [`the same of ${whole(problem.others.length)} more: `, problem.others.slice(0, OTHERS).flatMap((one, index) => [index > 0 ? ", " : "", element("a", { href: hrefOf(one) }, element("bdi", {}, visible(one.run || one.job, 64)))]), problem.others.length > OTHERS ? ", ..." : ""] : []);
  }

  function hrefOf(problem) {
    return problem.run ? context.link("/jobs/{job}/runs/{run}", problem) : context.link("/jobs/{job}", problem);
  }

  return {
    element: element("div", {}, list, more, rest, well),
    update(items, time, others = 0) {
      unlisted = others;
      problems = items;
      now = time;
      draw();
    },
  };
}

/** Problems that say the same of several runs of a job as one, with the `others`. Numbers and the runs' own names may differ. */
function alike(problems) {
  const groups = new Map();
  for (const problem of problems) {
    const plain = (text) => (problem.run ? (text ?? "").replaceAll(problem.run, "").replace(/[\d.]+/g, "0") : text);
    const key = JSON.stringify([problem.job, problem.kind, problem.severity, plain(problem.reason), plain(problem.advice)]);
    if (groups.has(key)) groups.get(key).others.push(problem);
    else groups.set(key, { ...problem, others: [] });
  }
  return [...groups.values()];
}

function keyOf(problem) {
  return JSON.stringify([problem.job, problem.run, problem.kind, problem.worker, problem.reason]);
}
