// A Gantt chart: lanes of bars over one axis of time. The arrow keys go from bar to bar within a lane and from lane to lane, a line
// below says what a bar is, and a table holds the same, so that nothing is said by position and colour alone.
import { element, keep, setAttribute, setChildren, setText } from "../shell/dom.js";
import { seconds, visible, whole } from "../shell/format.js";
import { table } from "./table.js";

const SVG = "http://www.w3.org/2000/svg";
const LANE_PIXELS = 22;
const TICKS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400];
const MOST_TICKS = 7;

/**
 * Makes a chart.
 *
 * @param {Object} options
 * @param {string} options.label - What it shows, for screen readers.
 * @param {function(Object, Object): string} options.styleOf - The style of a bar of a lane: a number of the CSS's series, or `wait`, `out`.
 * @param {function(string): void} options.announce - Reads a text out.
 * @param {Object<string, string>} options.words - What the names of bars mean, of those that need it.
 * @returns {{element: Element, update: function({begin: number, end: number, marks: Array<{label: string, at: number}>,
 *   lanes: Array<{key: string, title: string, role: string, bars: Array}>}): void}} `marks` divide the time, which is in seconds.
 */
export function gantt({ label, styleOf, announce, words }) {
  let shown = { begin: 0, end: 1, marks: [], lanes: [] };
  let picked = null;
  const axis = element("div", { class: "gantt-axis", "aria-hidden": "true" });
  const lanes = element("div", { class: "gantt-lanes" });
  const detail = element("p", { class: "gantt-detail" }, "");
  const legend = element("ul", { class: "gantt-legend" });
  const rows = table({ caption: `${label}, as a table`, columns: columns(() => shown.begin), keyOf: (bar) => bar.key, sort: { key: "begin", descending: false } });
  const toggle = element("button", { type: "button", class: "button small", "aria-expanded": "false", on: { click: () => showTable(rows.element.hidden) } }, "Table");
  const root = element("div", { class: "gantt", role: "group", "aria-label": label }, element("div", { class: "gantt-row" }, element("span", {}), axis), lanes, element("div", { class: "gantt-foot" }, detail, toggle), legend, rows.element);
  rows.element.hidden = true;

  function showTable(isOpen) {
    rows.element.hidden = !isOpen;
    setAttribute(toggle, "aria-expanded", String(isOpen));
    drawTable();
  }

  function drawTable() {
    if (rows.element.hidden) return;
    rows.update(shown.lanes.flatMap((lane) => lane.bars.map((bar, index) => ({ ...bar, lane: lane.title, key: `${lane.key} ${index}` }))));
  }

  function pick(lane, index, isKey) {
    const bar = lane.bars[index];
    if (!bar) return;
    if (picked) picked.removeAttribute("data-picked");
    picked = lanes.children[shown.lanes.indexOf(lane)]?.querySelectorAll("rect.gantt-bar")[index] ?? null;
    picked?.setAttribute("data-picked", "");
    const text = describe(bar, shown.begin);
    setText(detail, `${visible(lane.title, 80)}: ${text}${words[bar.name] ? `. ${words[bar.name]}` : ""}`);
    if (isKey) announce(text);
  }

  function onKey(event, node) {
    const at = shown.lanes.indexOf(node.lane);
    const move = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (move !== undefined && node.lane.bars.length) {
      node.position = Math.min(node.lane.bars.length - 1, Math.max(0, (node.position ?? (move > 0 ? -1 : 1)) + move));
      pick(node.lane, node.position, true);
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      lanes.children[at + (event.key === "ArrowDown" ? 1 : -1)]?.querySelector("[tabindex]").focus();
    } else return;
    event.preventDefault();
  }

  function makeLane(lane) {
    const svg = document.createElementNS(SVG, "svg");
    for (const [key, value] of Object.entries({ class: "gantt-bars", height: LANE_PIXELS, "aria-hidden": "true" })) svg.setAttribute(key, value);
    const box = element("div", { class: "gantt-track", tabindex: "0", role: "img", on: { keydown: (event) => onKey(event, box) } }, svg);
    svg.addEventListener("pointerover", (event) => event.target.dataset.index && pick(box.lane, Number(event.target.dataset.index), false));
    box.lane = lane;
    return element("div", { class: "gantt-row" }, element("span", { class: "gantt-title" }, element("bdi", {})), box);
  }

  function changeLane(node, lane) {
    const [title, box] = [node.firstChild.firstChild, node.lastChild];
    setText(title, visible(lane.title, 80));
    setAttribute(node.firstChild, "title", visible(lane.title, 200));
    setAttribute(box, "aria-label", `${visible(lane.title, 80)}: ${summary(lane.bars)}`);
    box.lane = lane;
    box.position = undefined;
    const span = shown.end - shown.begin || 1;
    const at = (time) => (100 * (time - shown.begin)) / span;
    const lines = shown.marks.map((mark) => rect({ class: "gantt-mark", x: `${at(mark.at)}%`, y: 0, width: 1, height: LANE_PIXELS }));
    const bars = lane.bars.map((bar, index) => {
      const style = styleOf(bar, lane);
      const isThin = style === "wait";
      const node = rect({ class: "gantt-bar", "data-style": style, "data-index": index, x: `${at(bar.begin)}%`, width: `${Math.max(0.12, at(bar.end) - at(bar.begin))}%`, y: isThin ? 8 : 3, height: isThin ? LANE_PIXELS - 16 : LANE_PIXELS - 6, rx: 2 });
      node.setAttribute("fill-opacity", bar.end > bar.begin ? Math.max(0.35, Math.min(1, bar.busy / (bar.end - bar.begin))).toFixed(2) : "1");
      return node;
    });
    box.firstChild.replaceChildren(...lines, ...bars);
  }

  return {
    element: root,
    update(next) {
      shown = next;
      picked = null;
      setText(detail, "Point at a bar, or go to a lane with Tab and to its bars with the arrow keys.");
      drawAxis(axis, shown);
      keep(lanes, shown.lanes, (lane) => lane.key, makeLane, changeLane);
      drawLegend(legend, shown.lanes, styleOf, words);
      drawTable();
    },
  };
}

function rect(attributes) {
  const node = document.createElementNS(SVG, "rect");
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

/** Ticks at round seconds, and the names of the marks. */
function drawAxis(axis, { begin, end, marks }) {
  const span = end - begin || 1;
  const tick = TICKS.find((one) => span / one <= MOST_TICKS) ?? span;
  const place = (node, at) => {
    node.style.left = `${(100 * at) / span}%`;
    return node;
  };
  const ticks = [];
  for (let at = 0; at <= span * 0.97; at += tick) ticks.push(place(element("span", { class: "gantt-tick" }, seconds(at)), at));
  const names = marks.map((mark) => place(element("span", { class: "gantt-name" }, mark.label), mark.at - begin));
  setChildren(axis, ...names, ...ticks);
}

/** One line for the lanes of a role, whose bars have their styles in common: its name, then what each style means there, once. */
function drawLegend(legend, lanes, styleOf, words) {
  const roles = new Map();
  for (const lane of lanes) {
    if (!roles.has(lane.role)) roles.set(lane.role, new Map());
    const names = roles.get(lane.role);
    for (const bar of lane.bars) if (!names.has(bar.name)) names.set(bar.name, styleOf(bar, lane));
  }
  const make = () => element("li", { class: "gantt-legend-line" }, element("bdi", { class: "gantt-title" }), element("ul", { class: "legend" }));
  keep(legend, [...roles], ([role]) => role, make, (line, [role, names]) => {
    setText(line.firstChild, visible(role, 40));
    const styles = new Map();
    for (const [name, style] of [...names].slice(0, 16)) styles.set(style, [...(styles.get(style) ?? []), name]);
    keep(line.lastChild, [...styles], ([style]) => style, () => element("li", { class: "gantt-key" }, element("span", { class: "gantt-swatch" }), element("bdi", {})), (node, [style, same]) => {
      node.firstChild.dataset.style = style;
      setAttribute(node, "title", same.map((name) => words[name]).filter(Boolean).join("; ") || null);
      setText(node.lastChild, same.map((name) => visible(name, 40).replaceAll("_", " ")).join(", "));
    });
  });
}

/** How long a lane was at what, the longest first. */
function summary(bars) {
  const sums = new Map();
  for (const bar of bars) sums.set(bar.name, (sums.get(bar.name) ?? 0) + bar.busy);
  const longest = [...sums].sort((a, b) => b[1] - a[1]).slice(0, 6);
  return longest.length ? longest.map(([name, sum]) => `${visible(name, 40).replaceAll("_", " ")} ${seconds(sum)}`).join(", ") : "nothing";
}

function describe(bar, begin) {
  const parts = [`${visible(bar.name, 40).replaceAll("_", " ")} for ${seconds(bar.end - bar.begin)}`, `from ${seconds(bar.begin - begin)} on`];
  if (bar.busy < 0.98 * (bar.end - bar.begin)) parts.push(`busy ${seconds(bar.busy)} of it`);
  if (bar.step) parts.push(`step ${whole(bar.step)}`);
  if (bar.run) parts.push(`run ${visible(bar.run, 40)}`);
  if (bar.count > 1) parts.push(`${whole(bar.count)} spans`);
  if (bar.detail) parts.push(visible(bar.detail, 200));
  return parts.join(", ");
}

function columns(begin) {
  return [
    { key: "lane", title: "Lane", value: (bar) => visible(bar.lane, 80) },
    { key: "name", title: "What", value: (bar) => visible(bar.name, 40).replaceAll("_", " ") },
    { key: "begin", title: "From", number: true, value: (bar) => bar.begin, cell: (bar) => seconds(bar.begin - begin()) },
    { key: "length", title: "For", number: true, value: (bar) => bar.end - bar.begin, cell: (bar) => seconds(bar.end - bar.begin) },
    { key: "busy", title: "Busy", number: true, value: (bar) => bar.busy, cell: (bar) => seconds(bar.busy) },
    { key: "step", title: "Step", number: true, value: (bar) => bar.step || null, cell: (bar) => (bar.step ? whole(bar.step) : "–") },
    { key: "run", title: "Run", value: (bar) => visible(bar.run || "–", 40) },
    { key: "detail", title: "Details", wide: true, value: (bar) => visible(bar.detail || "–", 200) },
  ];
}
