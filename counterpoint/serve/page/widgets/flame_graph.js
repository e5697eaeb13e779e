// A flame graph: each frame a box below its caller, as wide as its share of the time. A click or Enter makes a frame as wide as the
// graph, Escape goes back; the arrow keys go to callers, to what was called, and to neighbours. A line below says what a box is, a
// search marks frames, and a table holds the same by function.
import { element, keep, setAttribute, setText } from "../shell/dom.js";
import { percent, seconds, visible, whole } from "../shell/format.js";
import { placesOf, treeOf } from "./flame_tree.js";
import { table } from "./table.js";

/** Share of the graph's width below which a box is not drawn until somebody zooms in. */
const LEAST_WIDTH = 0.0008;
const MOST_BACK = 100;

/**
 * Makes a graph.
 *
 * @param {Object} options
 * @param {string} options.label - What it shows, for screen readers.
 * @param {function(string): void} options.announce - Reads a text out.
 * @returns {{element: Element, update: function(Array): void}} `update` takes the frames as `/profiles/{profile}` has them.
 */
export function flameGraph({ label, announce }) {
  let tree = treeOf([]);
  let zoomed = 0;
  let picked = 0;
  let back = [];
  let wanted = "";
  let drawn = [];
  const boxes = element("div", { class: "flame-boxes", role: "tree", "aria-label": label, on: { keydown: onKey, click: (event) => zoom(indexOf(event.target)), pointerover: (event) => pick(indexOf(event.target)), focusin: (event) => pick(indexOf(event.target)) } });
  const detail = element("p", { class: "flame-detail" });
  const search = element("input", { type: "search", class: "flame-search", placeholder: "Find a function or file", "aria-label": "Find a function or file", on: { input: () => find(), keydown: (event) => event.key === "Escape" && event.stopPropagation() } });
  const matches = element("span", { class: "muted", role: "status" });
  const backButton = element("button", { type: "button", class: "button small", on: { click: () => goBack() } }, "Back");
  const wholeButton = element("button", { type: "button", class: "button small", on: { click: () => zoom(0) } }, "Whole profile");
  const toggle = element("button", { type: "button", class: "button small", "aria-expanded": "false", on: { click: () => showTable(rows.element.hidden) } }, "Table");
  const rows = table({ caption: `${label}, by function`, columns: columns(() => tree.total), keyOf: (place) => place.key, sort: { key: "seconds", descending: true } });
  const root = element("div", { class: "flame", role: "group", "aria-label": label }, element("div", { class: "controls" }, search, backButton, wholeButton, toggle, matches), boxes, detail, rows.element);
  rows.element.hidden = true;

  function indexOf(target) {
    const box = target instanceof Element ? target.closest(".flame-box") : null;
    return box ? Number(box.dataset.index) : null;
  }

  function showTable(isOpen) {
    rows.element.hidden = !isOpen;
    setAttribute(toggle, "aria-expanded", String(isOpen));
    if (isOpen) rows.update(placesOf(tree));
  }

  function zoom(index, isBack = false) {
    if (index === null || index === zoomed || !tree.frames[index]) return;
    if (!isBack) back = [...back.slice(1 - MOST_BACK), zoomed];
    zoomed = index;
    draw();
    go(index);
    announce(describe(index));
  }

  function goBack() {
    if (back.length > 0) zoom(back.pop(), true);
  }

  function pick(index) {
    if (index === null) return;
    picked = index;
    for (const box of boxes.children) {
      const isPicked = Number(box.dataset.index) === index;
      setAttribute(box, "tabindex", isPicked ? "0" : "-1");
      setAttribute(box, "aria-selected", String(isPicked));
    }
    setText(detail, describe(index));
  }

  function go(index) {
    pick(index);
    boxes.querySelector("[tabindex='0']")?.focus({ preventScroll: false });
  }

  function onKey(event) {
    if (event.key === "Enter" || event.key === " ") zoom(picked);
    else if (event.key === "Escape") goBack();
    else {
      const next = neighbour(event.key);
      if (next === undefined) return;
      if (next !== null) go(next);
    }
    event.preventDefault();
  }

  /** The frame to which a key leads: null if there is none, undefined if the key is none of ours. */
  function neighbour(name) {
    const shown = drawn.map((box) => box.index);
    if (name === "ArrowUp") return picked === 0 ? null : tree.frames[picked].parent;
    if (name === "ArrowDown") return shown.find((index) => tree.frames[index].parent === picked) ?? null;
    if (name === "Home") return zoomed;
    const row = drawn.filter((box) => tree.depth[box.index] === tree.depth[picked]).map((box) => box.index);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[name];
    return step === undefined ? undefined : (row[row.indexOf(picked) + step] ?? null);
  }

  function draw() {
    drawn = boxesOf(tree, zoomed);
    boxes.style.height = `calc(var(--row) * ${1 + drawn.reduce((most, box) => Math.max(most, tree.depth[box.index]), 0)})`;
    keep(boxes, drawn, (box) => String(box.index), makeBox, changeBox);
    setAttribute(backButton, "disabled", back.length === 0);
    setAttribute(wholeButton, "disabled", zoomed === 0);
    if (!drawn.some((box) => box.index === picked)) picked = zoomed;
    pick(picked);
  }

  function makeBox({ index }) {
    const frame = tree.frames[index];
    const node = element("div", { class: "flame-box", role: "treeitem", "aria-level": tree.depth[index] + 1, "aria-label": describe(index, 0), "data-index": index, "data-tint": frame.file ? tintOf(frame.file) : null, "data-other": frame.other }, element("bdi", { "aria-hidden": "true" }, nameOf(frame, index)));
    node.style.top = `calc(var(--row) * ${tree.depth[index]})`;
    return node;
  }

  function changeBox(node, { index, left, width }) {
    node.style.left = `${100 * left}%`;
    node.style.width = `${100 * width}%`;
    setAttribute(node, "data-caller", index !== zoomed && width === 1 && tree.depth[index] < tree.depth[zoomed]);
    setAttribute(node, "data-match", matchesAt(index));
    setAttribute(node, "aria-expanded", tree.children[index].length > 0 ? "true" : null);
  }

  function matchesAt(index) {
    const frame = tree.frames[index];
    return wanted !== "" && `${frame.function} ${frame.file}`.toLowerCase().includes(wanted);
  }

  /** Marks what the search finds, and says its share: of frames that call one another, the outermost counts. */
  function find() {
    wanted = search.value.trim().toLowerCase();
    const isInside = [];
    let time = 0;
    let found = 0;
    for (const [index, frame] of tree.frames.entries()) {
      const isMatch = matchesAt(index);
      isInside[index] = isMatch || (isInside[frame.parent] ?? false);
      if (isMatch) found += 1;
      if (isMatch && !isInside[frame.parent]) time += frame.seconds;
    }
    setText(matches, wanted ? `${whole(found)} frames match: ${percent(time / tree.total)} of the time` : "");
    for (const box of boxes.children) setAttribute(box, "data-match", matchesAt(Number(box.dataset.index)));
  }

  function describe(index, within = zoomed) {
    const frame = tree.frames[index];
    if (!frame) return "";
    const parts = [index > 0 && !frame.other && frame.file && `${visible(frame.file, 200)}:${whole(frame.line).replaceAll(",", "")}`, `${seconds(frame.seconds)}, ${percent(frame.seconds / tree.total)} of the profile`];
    if (within > 0 && within !== index) parts.push(`${percent(Math.min(1, frame.seconds / tree.frames[within].seconds))} of the graph`);
    if (!frame.other) parts.push(`${seconds(frame.own)} in itself`);
    return `${nameOf(frame, index)}: ${parts.filter(Boolean).join(", ")}`;
  }

  return {
    element: root,
    update(frames) {
      tree = treeOf(frames);
      [zoomed, picked, back] = [0, 0, []];
      keep(boxes, [], String, makeBox);
      draw();
      find();
      setText(detail, "Point at a box, or go to the graph with Tab and to its boxes with the arrow keys. Enter zooms in, Escape goes back.");
      showTable(!rows.element.hidden);
    },
  };
}

/** Where the boxes are when a frame is as wide as the graph: its callers above it, and what it called. */
function boxesOf(tree, zoomed) {
  if (tree.frames.length === 0) return [];
  const boxes = [];
  for (let index = zoomed; index >= 0; index = tree.frames[index].parent) boxes.unshift({ index, left: 0, width: 1 });
  const all = tree.frames[zoomed].seconds;
  const waiting = [...tree.children[zoomed]];
  while (waiting.length > 0) {
    const index = waiting.shift();
    const width = tree.frames[index].seconds / all;
    if (width < LEAST_WIDTH) continue;
    boxes.push({ index, left: (tree.begin[index] - tree.begin[zoomed]) / all, width });
    waiting.push(...tree.children[index]);
  }
  return boxes;
}

function nameOf(frame, index) {
  if (index === 0) return "All";
  return frame.other ? "(left out: too little time each)" : visible(frame.function || "(no name)", 200);
}

/** A colour for a file's directory: a help for the eye, which says nothing that the text does not. */
function tintOf(file) {
  let sum = 0;
  for (const character of file.split("/").slice(0, -1).join("/") || file) sum = (sum * 31 + character.codePointAt(0)) % 9973;
  return (sum % 7) + 1;
}

function columns(total) {
  return [
    { key: "function", title: "Function", wide: true, value: (place) => visible(place.function || "(no name)", 200) },
    { key: "file", title: "File and line", wide: true, value: (place) => (place.file ? `${visible(place.file, 200)}:${place.line}` : "–") },
    { key: "seconds", title: "Time", help: "In it and in what it called", number: true, value: (place) => place.seconds, cell: (place) => seconds(place.seconds) },
    { key: "share", title: "Share", number: true, value: (place) => place.seconds, cell: (place) => percent(place.seconds / total()) },
    { key: "own", title: "In itself", number: true, value: (place) => place.own, cell: (place) => seconds(place.own) },
  ];
}
