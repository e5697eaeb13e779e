// The legend below a chart of several curves: each has its colour and dash, its value under the cursor, and can be hidden.
import { element, keep, setAttribute, setText } from "../shell/dom.js";
import { UNKNOWN, visible } from "../shell/format.js";
import { valueAt } from "./chart_series.js";
import { changeName, nameOf } from "./name.js";

/** Makes a legend; `update` takes the curves and the hidden keys, `values` the point whose values are shown (null: the newest). */
export function legend({ format, onToggle }) {
  const root = element("ul", { class: "legend", hidden: true });
  const buttons = new Map();

  function make(curve) {
    const button = element("button", { type: "button", class: "legend-item", on: { click: () => onToggle(curve.key) } }, swatch(curve.style), nameOf("legend-name"), element("span", { class: "legend-value" }));
    buttons.set(curve.key, button);
    return element("li", {}, button);
  }

  function change(curve, hidden) {
    const button = buttons.get(curve.key);
    setAttribute(button, "aria-pressed", String(!hidden.has(curve.key)));
    setAttribute(button.children[1], "title", visible(curve.label, 200));
    changeName(button.children[1], curve.label); // the curve of its place may be another run's now
    button.firstChild.dataset.series = curve.style.colour;
    button.firstChild.dataset.dash = curve.style.dash.length;
  }

  return {
    element: root,
    update(curves, hidden) {
      const shown = curves.length < 2 ? [] : curves;
      setAttribute(root, "hidden", shown.length === 0);
      keep(root, shown, (curve) => curve.key, make, (_, curve) => change(curve, hidden));
      for (const key of buttons.keys()) if (!shown.some((curve) => curve.key === key)) buttons.delete(key);
    },
    values(curves, index) {
      for (const curve of curves) {
        const button = buttons.get(curve.key);
        if (!button) continue;
        const value = valueAt(curve.mean, index);
        setText(button.lastChild, value === null ? UNKNOWN : format(value));
      }
    },
  };
}

/** A short line in a curve's colour and dash. */
export function swatch(style) {
  return element("span", { class: "swatch", "aria-hidden": "true", dataset: { series: style.colour, dash: style.dash.length } });
}
