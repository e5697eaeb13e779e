// The numbers of a chart as a table: for screen readers, and for those who want to copy them.
import { element } from "../shell/dom.js";
import { UNKNOWN, clock, seconds, visible, whole } from "../shell/format.js";
import { AXES, isKnown } from "./chart_series.js";

const ROWS = 200;

/** Fills `container` with the newest points of `data`, newest first. */
export function fillTable(container, title, data, format) {
  const first = Math.max(0, data.x.length - ROWS);
  const rows = [];
  for (let index = data.x.length - 1; index >= first; index -= 1) {
    const values = data.curves.map((curve) => element("td", { class: "number" }, isKnown(curve.mean[index]) ? format(curve.mean[index]) : UNKNOWN));
    rows.push(element("tr", {}, element("th", { scope: "row", class: "number" }, place(data, index)), values));
  }
  const head = element("tr", {}, element("th", { scope: "col", class: "number" }, AXES[data.axis].title), data.curves.map((curve) => element("th", { scope: "col", class: "number" }, visible(curve.label, 40))));
  const left = first > 0 ? `, the newest ${ROWS} of ${whole(data.x.length)} points` : "";
  container.replaceChildren(element("table", { class: "data compact" }, element("caption", {}, `${title}${left}`), element("thead", {}, head), element("tbody", {}, rows)));
}

function place({ x, axis }, index) {
  return { step: whole, time: clock, elapsed: seconds }[axis](x[index]);
}
