// The charts of a run's metrics: the first ones at the top, the others in sections that open. Only charts that are open are drawn, and
// only their metrics are asked for.
import { element, keep, setAttribute, setText } from "../shell/dom.js";
import { visible, whole } from "../shell/format.js";
import { chart } from "../widgets/chart.js";
import { chartData } from "./curves.js";
import { chartsOf } from "./metric_charts.js";

const MOST_CHARTS = 48;

/**
 * Makes the charts.
 *
 * @param {Object} options
 * @param {ZoomGroup} options.group
 * @param {Object} options.controls - As `chartControls` makes them.
 * @param {function(): void} options.onNames - Called when other metrics are wanted.
 */
export function chartGrid({ group, controls, onNames }) {
  const note = element("p", { class: "empty" }, "Reading the run's metrics.");
  const first = element("div", { class: "charts" });
  const sections = element("div", {});
  const charts = new Map();
  let asked = "";

  /** What is shown of the charts that there are: `top` and `sections`, of which `open` ones have charts. */
  function plan(available) {
    const { first: top, sections: all } = chartsOf(available);
    const filter = controls.filter();
    const isWanted = (spec) => spec.title.toLowerCase().includes(filter) || spec.metrics.some((metric) => metric.name.toLowerCase().includes(filter));
    const rest = all.map((section) => ({ ...section, charts: section.charts.filter(isWanted) })).filter((section) => section.charts.length > 0);
    const open = new Set(rest.filter((section) => filter || controls.has("open", section.key)).map((section) => section.key));
    const shownTop = top.filter(isWanted);
    const drawn = [...shownTop, ...rest.filter((section) => open.has(section.key)).flatMap((section) => section.charts)].slice(0, MOST_CHARTS);
    return { top: shownTop, sections: rest, open, drawn };
  }

  function namesOf(drawn) {
    return [...new Set(drawn.flatMap((spec) => spec.metrics.flatMap(({ name, low, high }) => (low ? [name, low, high] : [name]))))];
  }

  function makeChart(spec) {
    const one = chart({ title: visible(spec.title, 80), unit: spec.unit, help: visible(spec.help, 200), format: spec.format, group, isLog: controls.has("log", spec.key), onLog: () => controls.toggle("log", spec.key) });
    charts.set(spec.key, one);
    return one.element;
  }

  function makeSection() {
    const button = element("button", { type: "button", class: "section-toggle" }, element("span", { class: "section-arrow", "aria-hidden": "true" }), element("bdi", {}), element("span", { class: "muted" }));
    return element("section", { class: "section metrics" }, element("h2", {}, button), element("div", { class: "charts" }), element("p", { class: "muted" }));
  }

  function changeSection(node, section, isOpen, drawn) {
    const button = node.firstChild.firstChild;
    const shown = isOpen ? section.charts.filter((spec) => drawn.includes(spec)) : [];
    button.onclick = () => {
      controls.toggle("open", section.key);
      onNames();
    };
    setAttribute(button, "aria-expanded", String(isOpen));
    setText(button.children[1], visible(section.title, 60));
    setText(button.children[2], whole(section.charts.length));
    keep(node.children[1], shown, (spec) => spec.key, makeChart);
    setText(node.children[2], isOpen && shown.length < section.charts.length ? `${whole(section.charts.length - shown.length)} more: filter the metrics to see them` : "");
  }

  return {
    element: element("div", {}, note, first, sections),

    /** The metrics that the charts need. */
    names(available) {
      const names = namesOf(plan(available).drawn);
      asked = names.join();
      return names;
    },

    /** Draws what there is. `available` are the names of the run's metrics. */
    draw({ available, runs, curves, began, axis }) {
      const { top, sections: rest, open, drawn } = plan(available);
      keep(first, top, (spec) => spec.key, makeChart);
      keep(sections, rest, (section) => section.key, makeSection, (node, section) => changeSection(node, section, open.has(section.key), drawn));
      for (const [key, one] of charts) {
        if (drawn.some((spec) => spec.key === key)) continue;
        one.destroy();
        charts.delete(key);
      }
      const options = { axis, smoothing: controls.smoothing(), began, isLogX: controls.isLogX() };
      for (const spec of drawn) charts.get(spec.key).update(chartData(spec, runs, curves, options));
      setText(note, available.length === 0 ? "No step is complete yet. Curves begin with the first one." : "No metric has this name.");
      setAttribute(note, "hidden", drawn.length > 0);
      if (namesOf(drawn).join() !== asked) onNames();
    },

    destroy() {
      for (const one of charts.values()) one.destroy();
      charts.clear();
    },
  };
}
