// A chart of curves over steps or time, around uPlot. It can be zoomed by dragging and by keys, keeps its zoom while new points
// arrive, shows the least and the greatest value of what was thinned out as a band, has a table of the same numbers, and can be enlarged,
// drawn over the logarithm, and saved.
import { element, icon, setAttribute, setText } from "../shell/dom.js";
import { bytes, number, visible } from "../shell/format.js";
import { colour, onThemeChange } from "../shell/theme.js";
import { saveCsv, savePng } from "./chart_export.js";
import { legend } from "./chart_legend.js";
import { AXES, BYTE_STEPS, columnsOf, describe, nearest, seriesOf, tickOf, valueAt } from "./chart_series.js";
import { fillTable } from "./chart_table.js";

const HEIGHT = 168;
const FONT = "11px system-ui, sans-serif";
const ICON_TABLE = "M2 3h12v10H2zM2 6.5h12M2 9.8h12M6.5 3v10";
const LARGE = 420;
const ICON_LARGE = "M9.5 2.5h4v4M13.5 2.5 9 7M6.5 13.5h-4v-4M2.5 13.5 7 9";
const ICON_SAVE = "M8 2v8M4.8 7 8 10.2 11.2 7M2.5 13.5h11";
const ICON_PICTURE = "M2 3h12v10H2zM2 11l3.5-4 3 3 2-2L14 11M10.5 5.6h.01";
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
 * @param {boolean} [options.isLog] - Whether values are drawn over their logarithm at first, and `onLog` is told that the reader changed it.
 * @param {function(number): void} [options.onPick] - Called with the x of a point that the reader picked (a click, or Enter).
 * @returns {{element: Element, update: function(Object): void, destroy: function(): void}} `update` takes `{x, axis, isLogX, curves}`: `x`
 *   ascending numbers, positive with `isLogX`, `axis` a name of `AXES`, `curves` a list of `{key, label, style, mean, minimum, maximum, raw}` whose
 *   arrays are as long as `x`; only `mean` must be there.
 */
export function chart(options) {
  return new Chart(options);
}

class Chart {
  constructor({ title, unit = "", help = "", format = number, group, height = HEIGHT, isWide = false, isLog = false, onLog = () => {}, onPick = null }) {
    Object.assign(this, { title, unit, format, group, height, normal: height, isLog, onLog, onPick });
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
    const [min, max] = range ?? this.#rangeOf(x[0], x[x.length - 1]);
    const least = this.data.isLogX ? Math.max(min, x[0]) : min; // uPlot never ends at a logarithmic axis that begins at 0
    if (least < max) this.plot.setScale("x", { min: least, max });
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
    this.logButton = element("button", { type: "button", class: "icon-button log-button", "aria-label": `Draw ${title} over the logarithm`, "aria-pressed": String(this.isLog), title: "Logarithmic axis: what is not above 0 is left out", on: { click: () => this.#toggleLog() } }, "log");
    this.largeButton = button(ICON_LARGE, `Enlarge ${title}`, () => this.#toggleLarge());
    setAttribute(this.largeButton, "aria-pressed", "false");
    const tools = element("div", { class: "chart-tools" }, this.reset, this.logButton, this.largeButton, button(ICON_SAVE, `Save ${title} as CSV`, () => saveCsv(title, this.data)), button(ICON_PICTURE, `Save ${title} as a picture`, () => this.plot && savePng(title, this.plot, this.#shownCurves())), this.tableButton);
    const name = element("span", { class: "chart-title", title: help || null }, title, unit && element("span", { class: "unit" }, unit));
    setAttribute(this.reset, "hidden", this.group.range === null);
    setAttribute(this.tableButton, "aria-expanded", "false");
    this.element = element("figure", { class: isWide ? "chart wide" : "chart", "aria-label": unit ? `${title}, ${unit}` : title }, element("figcaption", { class: "chart-head" }, name, this.at, this.value), element("div", { class: "chart-body" }, this.canvas, this.empty, tools), this.legend.element, this.numbers);
    this.canvas.addEventListener("keydown", (event) => this.group.onKey(event, this.data.x, this.onPick));
    this.canvas.addEventListener("dblclick", () => this.group.reset());
  }

  #draw() {
    const curves = this.#shownCurves();
    const shape = JSON.stringify([this.data.axis, this.data.isLogX, this.isLog, this.height, curves.map((curve) => [curve.key, curve.style.key, Boolean(curve.minimum), Boolean(curve.raw)])]);
    if (shape !== this.shape) {
      this.plot?.destroy();
      this.plot = null;
      this.shape = shape;
    }
    if (this.plot) this.plot.setData(columnsOf(this.data.x, curves, this.isLog), this.group.range === null);
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
      scales: { x: { time: axis.isTime, distr: this.data.isLogX ? 3 : 1, range: (_, least, greatest) => this.#rangeOf(least, greatest) }, y: { distr: this.isLog ? 3 : 1 } },
      axes: [
        { ...look, size: 26, gap: 6, space: axis.isTime ? 70 : 50, ...(axis.steps && !this.data.isLogX ? { incrs: axis.steps } : {}), values: (_, splits, __, ___, distance) => splits.map((split) => (split === null ? "" : axis.tick(split, distance))) },
        { ...look, size: 54, gap: 6, ...(this.format === bytes && !this.isLog ? { incrs: BYTE_STEPS } : {}), values: (_, splits, __, ___, step) => splits.map((split) => (split === null ? "" : this.#tick(split, step))) },
      ],
      series,
      bands,
      hooks: { setSelect: [(plot) => this.#onSelect(plot)], setCursor: [(plot) => this.#onCursor(plot)], setScale: [(plot, key) => key === "x" && this.#noteRange(plot)], drawAxes: [(plot) => this.#drawMarks(plot)] },
    };
    const plot = new window.uPlot(options, columnsOf(this.data.x, curves, this.isLog), this.canvas);
    if (this.onPick) plot.over.addEventListener("click", () => Number.isInteger(plot.cursor.idx) && this.onPick(this.data.x[plot.cursor.idx]));
    return plot;
  }

  /** A value beside the axis. */
  #tick(value, step) {
    if (this.isLog) return this.format === number ? number(value, 1) : this.format(value);
    return tickOf(value, step, this.format);
  }

  /** The range of x: all that the charts of the group have, so that they lie below each other, if this one's points are in it. */
  #rangeOf(least, greatest) {
    if (least === null) return [1, 2]; // without a point
    const [first, last] = this.group.extent ?? [least, greatest];
    if (this.group.range === null && first < last && first <= least && last >= greatest) return [this.data.isLogX ? Math.max(first, Math.min(1, least)) : first, last];
    return least === greatest ? [this.data.isLogX ? least / 2 : least - 1, greatest + 1] : [least, greatest];
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

  #toggleLog() {
    this.isLog = !this.isLog;
    setAttribute(this.logButton, "aria-pressed", String(this.isLog));
    this.onLog();
    this.#draw();
  }

  #toggleLarge() {
    const isLarge = this.element.classList.toggle("large");
    setAttribute(this.largeButton, "aria-pressed", String(isLarge));
    this.height = isLarge ? Math.max(LARGE, this.normal) : this.normal;
    this.canvas.style.height = `${this.height}px`;
    this.#draw();
    if (isLarge) this.element.scrollIntoView({ block: "nearest" });
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
