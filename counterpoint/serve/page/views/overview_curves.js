// The curves of the overview: reward, evaluation, mismatch and loop lag over whole runs. Of one run they are its own; of several, those
// of the chosen ones lie over each other.
import { element, setAttribute, setText } from "../shell/dom.js";
import { visible } from "../shell/format.js";
import { ZoomGroup } from "../widgets/zoom_group.js";
import { chartControls } from "./chart_controls.js";
import { chartGrid } from "./chart_grid.js";
import { Curves } from "./curves.js";

const PRESET = 4;
const STEP = "step";

/** Makes the curves; `update` takes all runs, and returns those that are drawn. */
export function overviewCurves(context) {
  let all = [];
  let drawn = "";
  const controls = chartControls(context, { onChange: () => {}, onRuns: () => context.refresh() }, () => newest(all).map(({ job, run }) => [job, run]));
  const group = new ZoomGroup(() => context.refresh());
  const grid = chartGrid({ group, controls, onNames: () => {} });
  const curves = new Curves();
  const unreadable = element("p", { class: "empty", hidden: true });
  const root = element("section", { class: "section", hidden: true }, element("div", { class: "section-head" }, element("h2", {}, "Curves"), controls.choice), unreadable, grid.element);

  /** The chosen runs that are there, with their labels. */
  function chosen() {
    return controls.others().flatMap((one) => all.filter((run) => run.job === one.job && run.run === one.run).map((run) => ({ ...run, label: one.label })));
  }

  function draw(shown) {
    if (!group.range) group.setExtent(curves.extent());
    const available = namesOf(shown).filter((name) => shown.some(({ job, run }) => curves.get(job, run, name)?.x.length > 0));
    grid.draw({ available, runs: shown, curves, began: new Map(), axis: STEP });
    setText(unreadable, curves.unreadable.map((text) => visible(text, 300)).join("; "));
    setAttribute(unreadable, "hidden", curves.unreadable.length === 0);
  }

  return {
    element: root,
    async update(runs) {
      all = runs.filter((run) => run.step > 0);
      const shown = chosen();
      setAttribute(root, "hidden", all.length === 0);
      if (shown.length === 0) {
        if (all.length > 0) context.setQuery({ with: "" }); // the runs of the address are gone
        return [];
      }
      const keys = JSON.stringify(shown.map(({ job, run }) => [job, run]));
      const areOthers = keys !== drawn;
      drawn = keys;
      if (areOthers) controls.show();
      for (const part of controls.choice) setAttribute(part, "hidden", all.length < 2);
      const hasChanged = await curves.fetch(context, shown, namesOf(shown), { axis: STEP, range: group.range });
      if (hasChanged || areOthers) draw(shown);
      return shown;
    },
    destroy: () => grid.destroy(),
  };
}

/** The runs that are drawn until others are chosen: those that live, then those that lived last. Their order is kept. */
function newest(runs) {
  return [...runs].sort((a, b) => b.alive - a.alive || (a.alive ? 0 : b.updated - a.updated)).slice(0, PRESET);
}

/** The metrics that are asked for. Of several runs, one of the loop. */
function namesOf(runs) {
  const evaluated = [...new Set(runs.map((run) => run.evaluation_metric).filter(Boolean))].flatMap((name) => [name, `${name}/low`, `${name}/high`]);
  const loss = runs.some((run) => run.fine_tuning) ? ["loss"] : [];
  return ["reward/mean", ...evaluated, "mismatch_kl", ...loss, "event_loop_lag/p99", ...(runs.length > 1 ? [] : ["event_loop_lag/max"])];
}
