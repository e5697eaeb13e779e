// A histogram: bars over equal stretches of values. Its name for screen readers says how many values there are and where most are.
import { element, setChildren } from "../shell/dom.js";
import { whole } from "../shell/format.js";
import { drawing, titled } from "./drawing.js";

const [WIDTH, HEIGHT] = [240, 48];

/** Makes a histogram of values that read as `format` writes them; `update` takes `{edges, counts}`. */
export function histogram(title, format) {
  const least = element("span", {});
  const greatest = element("span", {});
  const bars = element("div", {});
  const root = element("figure", { class: "histogram" }, element("figcaption", {}, title), bars, element("div", { class: "histogram-ends muted" }, least, greatest));

  return {
    element: root,
    update({ edges, counts }) {
      root.hidden = counts.length === 0;
      if (root.hidden) return;
      const most = Math.max(...counts);
      const width = WIDTH / counts.length;
      const stretch = (index) => (counts.length === 1 ? format(edges[0]) : `${format(edges[index])} to ${format(edges[index + 1])}`);
      const shapes = counts.map((count, index) => drawing("rect", { class: "histogram-bar", x: index * width + 0.5, y: HEIGHT - (HEIGHT * count) / most, width: width - 1, height: (HEIGHT * count) / most }, titled(`${stretch(index)}: ${whole(count)}`)));
      const sum = counts.reduce((total, count) => total + count, 0);
      setChildren(bars, drawing("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${whole(sum)} rollouts, most of them, ${whole(most)}, at ${stretch(counts.indexOf(most))}` }, shapes));
      least.textContent = counts.length === 1 ? "" : format(edges[0]);
      greatest.textContent = format(edges[edges.length - 1]);
    },
  };
}
