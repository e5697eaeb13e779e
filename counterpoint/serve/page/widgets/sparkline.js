// A curve the size of a word, for tables, and a thin bar that shows how much is done. Both are decoration beside a number.
import { setAttribute } from "../shell/dom.js";

const WIDTH = 96;
const HEIGHT = 22;
const NAMESPACE = "http://www.w3.org/2000/svg";

/** An empty sparkline; `changeSparkline` draws it. */
export function sparkline() {
  const svg = document.createElementNS(NAMESPACE, "svg");
  for (const [name, value] of Object.entries({ class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" })) svg.setAttribute(name, value);
  svg.append(document.createElementNS(NAMESPACE, "path"));
  return svg;
}

/** Draws numbers; those that are missing are gaps. */
export function changeSparkline(svg, values) {
  setAttribute(svg.firstChild, "d", pathOf(Array.isArray(values) ? values.slice(-WIDTH) : []));
}

/** The path of a curve that fills the sparkline. */
export function pathOf(values) {
  const known = values.filter((value) => typeof value === "number" && Number.isFinite(value));
  if (known.length < 2) return "";
  const [least, greatest] = [Math.min(...known), Math.max(...known)];
  const height = greatest - least || 1;
  let pen = "M";
  return values
    .map((value, index) => {
      if (typeof value !== "number" || !Number.isFinite(value)) {
        pen = "M";
        return "";
      }
      const x = (index / (values.length - 1)) * WIDTH;
      const y = HEIGHT - 2 - ((value - least) / height) * (HEIGHT - 4);
      const command = `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
      pen = "L";
      return command;
    })
    .join("");
}

/** A bar; `changeProgress` fills it. */
export function progress() {
  const bar = document.createElement("span");
  bar.className = "progress";
  bar.setAttribute("aria-hidden", "true");
  bar.append(Object.assign(document.createElement("span"), { className: "progress-done" }));
  return bar;
}

/** Fills a bar to a share; hides it if the share is unknown. */
export function changeProgress(bar, share) {
  bar.hidden = typeof share !== "number" || !Number.isFinite(share);
  bar.firstChild.style.width = bar.hidden ? "0" : `${Math.round(Math.max(0, Math.min(1, share)) * 1000) / 10}%`;
}
