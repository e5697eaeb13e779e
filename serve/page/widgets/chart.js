// A chart of curves over steps or time, around uPlot. It can be zoomed by dragging and by keys, keeps its zoom while new points
// arrive, shows the least and the greatest value of what was thinned out as a band, and has a table of the same numbers.
import { element, icon, setAttribute, setText } from "../shell/dom.js";
import { number, visible } from "../shell/format.js";
import { colour, onThemeChange } from "../shell/theme.js";
import { legend } from "./chart_legend.js";
import { AXES, columnsOf, describe, nearest, seriesOf, tickOf, valueAt } from "./chart_series.js";
import { fillTable } from "./chart_table.js";

const HEIGHT = 168;
const FONT = "11px system-ui, sans-serif";
const ICON_TABLE = "M2 3h12v10H2zM2 6.5h12M2 9.8h12M6.5 3v10";
const ICON_RESET = "M3 8a5 5 0 1 0 1.6-3.7M3 2.5V5.5H6";

/**
 * Makes a chart.
 *
 * @param {Object} options
 * @param {string} options.title
 * @param {string} [options.unit] - Of the values, such as `s`.
 * @param {string} [options.help] - What the values mean.
 * @param {function(number): string} [options.format] - Of a value.
 * @param {ZoomGroup} options.group - The charts that share cursor and zoom.
 * @param {number} [options.height] - In pixels.
 * @param {boolean} [options.isWide] - As wide as the view.
 * @param {function(number): void} [options.onPick] - Called with the x of a point that the reader picked (a click, or Enter).
 * @returns {{element: Element, update: function(Object): void, destroy: function(): void}} `update` takes `{x, axis, curves}`: `x`
 *   ascending numbers, `axis` a name of `AXES`, `curves` a list of `{key, label, style, mean, minimum, maximum, raw}` whose
 *   arrays are as long as `x`; only `mean` must be there.
 */
export function chart(options) {
  return new Chart(options);
}

class Chart {
  constructor({ title, unit = "", help = "", format = number, group, height = HEIGHT, isWide = false, onPick = null }) {
    Object.assign(this, { title, unit, format, group, height, onPick });
    this.data = { x: [], axis: "step", curves: [] };
    this.hidden = new Set();
    this.plot = null;
    this.shape = "";
    this.#build(help, isWide);
    this.resize = new ResizeObserver(() => this.#onResize());
    this.resize.observe(this.canvas);
    this.forgetTheme = onThemeChange(() => this.plot?.redraw(false));
    group.add(this);
  }

  /** Shows new points. */
  update(data) {
    this.data = data;
    this.#draw();
  }

  /** Ends what the chart has begun. */
  destroy() {
    this.resize.disconnect();
    this.forgetTheme();
    this.group.remove(this);
    this.plot?.destroy();
    this.plot = null;
  }

  /** Shows a range of x, all at null. Called by the group. */
  zoomTo(range) {
    setAttribute(this.reset, "hidden", range === null);
    const { x } = this.data;
    if (!this.plot || x.length === 0) return;
    const [min, max] = range ?? [x[0], x[x.length - 1]];
    this.plot.setScale("x", { min, max });
  }

  /** Moves the cursor to an x. Called by the group. */
  moveTo(x) {
    if (!this.plot || this.data.x.length === 0) return;
    const index = nearest(this.data.x, x);
    this.plot.setCursor({ left: this.plot.valToPos(this.data.x[index], "x"), top: 1 }, false);
    this.#showAt(index);
  }

  #build(help, isWide) {
    const { title, unit } = this;
    this.value = element("span", { class: "chart-value" });
    this.at = element("span", { class: "chart-at" });
    this.reset = button(ICON_RESET, `Reset the zoom of ${title}`, () => this.group.reset());
    this.tableButton = button(ICON_TABLE, `Show ${title} as a table`, () => this.#toggleTable());
    this.canvas = element("div", { class: "chart-canvas", tabindex: "0", role: "img", "aria-label": title });
    this.canvas.style.height = `${this.height}px`;
    this.empty = element("p", { class: "chart-empty" }, "No values yet");
    this.numbers = element("div", { class: "chart-table", hidden: true, tabindex: "0", role: "region", "aria-label": `${title} as a table` });
    this.legend = legend({ format: this.format, onToggle: (key) => this.#toggleCurve(key) });
    const name = element("span", { class: "chart-title", title: help || null }, title, unit && element("span", { class: "unit" }, unit));
    setAttribute(this.reset, "hidden", this.group.range === null);
    setAttribute(this.tableButton, "aria-expanded", "false");
    this.element = element("figure", { class: isWide ? "chart wide" : "chart", "aria-label": unit ? `${title}, ${unit}` : title }, element("figcaption", { class: "chart-head" }, name, this.at, this.value, this.reset, this.tableButton), element("div", { class: "chart-body" }, this.canvas, this.empty), this.legend.element, this.numbers);
    this.canvas.addEventListener("keydown", (event) => this.group.onKey(event, this.data.x, this.onPick));
    this.canvas.addEventListener("dblclick", () => this.group.reset());
  }

  #draw() {
    const curves = this.#shownCurves();
    const shape = JSON.stringify([this.data.axis, curves.map((curve) => [curve.key, curve.style.key, Boolean(curve.minimum), Boolean(curve.raw)])]);
    if (shape !== this.shape) {
      this.plot?.destroy();
      this.plot = null;
      this.shape = shape;
    }
    if (this.plot) this.plot.setData(columnsOf(this.data.x, curves), this.group.range === null);
    else if (this.canvas.clientWidth > 0) this.plot = this.#makePlot(curves);
    if (this.plot && this.group.range) this.zoomTo(this.group.range);
    this.legend.update(this.data.curves, this.hidden);
    setAttribute(this.empty, "hidden", this.data.x.length > 0);
    this.#showAt(this.group.cursor === null || this.data.x.length === 0 ? null : nearest(this.data.x, this.group.cursor));
    if (!this.numbers.hidden) fillTable(this.numbers, this.title, this.data, this.format);
    setAttribute(this.canvas, "aria-label", describe(this.title, this.unit, this.data, this.format));
  }

  #makePlot(curves) {
    const axis = AXES[this.data.axis];
    const look = { stroke: () => colour("--muted"), font: FONT, grid: { stroke: () => colour("--grid"), width: 1 }, ticks: { show: false } };
    const { series, bands } = seriesOf(curves);
    const options = {
      width: this.canvas.clientWidth,
      height: this.height,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      cursor: { y: false, sync: { key: this.group.key, setSeries: false }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
      scales: { x: { time: axis.isTime, range: (_, least, greatest) => (least === greatest ? [least - 1, greatest + 1] : [least, greatest]) } },
      axes: [
        { ...look, size: 24, gap: 4, ...(axis.steps ? { incrs: axis.steps } : {}), values: axis.isTime ? undefined : (_, splits) => splits.map((split) => axis.tick(split)) },
        { ...look, size: 54, gap: 6, values: (_, splits, __, ___, step) => splits.map((split) => tickOf(split, step, this.format)) },
      ],
      series,
      bands,
      hooks: { setSelect: [(plot) => this.#onSelect(plot)], setCursor: [(plot) => this.#onCursor(plot)], setScale: [(plot, key) => key === "x" && this.#noteRange(plot)], drawAxes: [(plot) => this.#drawMarks(plot)] },
    };
    const plot = new window.uPlot(options, columnsOf(this.data.x, curves), this.canvas);
    if (this.onPick) plot.over.addEventListener("click", () => Number.isInteger(plot.cursor.idx) && this.onPick(this.data.x[plot.cursor.idx]));
    return plot;
  }

  /** Says on the element which part of x is shown. */
  #noteRange(plot) {
    const { min, max } = plot.scales.x;
    this.element.dataset.range = `${min} ${max}`;
  }

  /** Draws a dashed line at each moment that the group marks. */
  #drawMarks(plot) {
    const { left, top, width, height } = plot.bbox;
    const { ctx } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--busy");
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    for (const { x } of this.group.marks) {
      const at = Math.round(plot.valToPos(x, "x", true));
      if (at < left || at > left + width) continue;
      ctx.moveTo(at, top);
      ctx.lineTo(at, top + height);
    }
    ctx.stroke();
    ctx.restore();
  }

  #onResize() {
    if (this.canvas.clientWidth === 0) return;
    if (this.plot) this.plot.setSize({ width: this.canvas.clientWidth, height: this.height });
    else if (this.shape) this.#draw();
  }

  #onSelect(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.group.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  #onCursor(plot) {
    const { idx, left } = plot.cursor;
    this.#showAt(left >= 0 && Number.isInteger(idx) ? idx : null);
  }

  #shownCurves() {
    return this.data.curves.filter((curve) => !this.hidden.has(curve.key));
  }

  #toggleCurve(key) {
    if (!this.hidden.delete(key)) this.hidden.add(key);
    this.#draw();
  }

  #toggleTable() {
    this.numbers.hidden = !this.numbers.hidden;
    setAttribute(this.tableButton, "aria-expanded", String(!this.numbers.hidden));
    if (!this.numbers.hidden) fillTable(this.numbers, this.title, this.data, this.format);
  }

  /** Shows the values at a point in the head and in the legend; the newest ones at null. */
  #showAt(index) {
    const curves = this.#shownCurves();
    const single = this.data.curves.length === 1 && curves.length === 1 ? valueAt(curves[0].mean, index) : null;
    setText(this.value, single === null ? "" : this.format(single));
    setText(this.at, index !== null && index < this.data.x.length ? labelOf(this.data, index, this.group.marks) : "");
    this.legend.values(this.data.curves, index);
  }
}

/** The place of a point in words, with what was changed there. */
function labelOf({ x, axis }, index, marks) {
  const mark = marks.find((one) => one.x <= x[index] && (index === 0 || one.x > x[index - 1]));
  return AXES[axis].label(x[index]) + (mark ? ` · ${visible(mark.text, 70)}` : "");
}

function button(path, label, onClick) {
  return element("button", { type: "button", class: "icon-button", "aria-label": label, title: label, on: { click: onClick } }, icon(path));
}
