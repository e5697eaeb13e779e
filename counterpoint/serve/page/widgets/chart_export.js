// A chart as a file: its numbers as CSV, or its picture with title and legend as PNG. Nothing leaves the browser.
import { colour } from "../shell/theme.js";
import { visible } from "../shell/format.js";
import { AXES, isKnown } from "./chart_series.js";

const ROW = 22;

/** Saves the points of a chart as CSV: the axis, and of each curve its value and, where it has them, the ends of its band. */
export function saveCsv(title, { x, axis, curves }) {
  const columns = curves.flatMap(({ label, mean, minimum, maximum }) => [[label, mean], ...(minimum ? [[`${label} low`, minimum], [`${label} high`, maximum]] : [])]);
  const rows = x.map((at, index) => [at, ...columns.map(([, values]) => (isKnown(values[index]) ? values[index] : ""))].join(","));
  const head = [axis === "time" ? "unix seconds" : AXES[axis].title, ...columns.map(([name]) => name)].map(quoted).join(",");
  save(title, "csv", new Blob([`${[head, ...rows].join("\n")}\n`], { type: "text/csv" }));
}

/** Saves the picture that uPlot has drawn, with the title above and the names of the curves below. */
export function savePng(title, plot, curves) {
  const source = plot.ctx.canvas;
  const scale = source.width / source.clientWidth;
  const picture = document.createElement("canvas");
  const pen = picture.getContext("2d");
  const width = source.width / scale;
  const places = placesOf(curves.length > 1 ? curves : [], width, pen);
  picture.width = source.width;
  picture.height = source.height + ROW * (places.rows + 1.4) * scale;
  pen.scale(scale, scale);
  pen.fillStyle = colour("--panel");
  pen.fillRect(0, 0, width, picture.height / scale);
  pen.fillStyle = colour("--strong");
  pen.font = "600 13px system-ui, sans-serif";
  pen.fillText(title, 10, 18, width - 20);
  pen.drawImage(source, 0, ROW * 1.2, width, source.height / scale);
  pen.font = "12px system-ui, sans-serif";
  for (const { label, style, left, row } of places.items) {
    const y = ROW * (row + 1.7) + source.height / scale;
    pen.strokeStyle = style.stroke();
    pen.lineWidth = 2.5;
    pen.setLineDash(style.dash);
    pen.beginPath();
    pen.moveTo(left, y - 4);
    pen.lineTo(left + 20, y - 4);
    pen.stroke();
    pen.fillStyle = colour("--text");
    pen.fillText(label, left + 26, y);
  }
  picture.toBlob((blob) => save(title, "png", blob));
}

/** Where the names of the curves stand, row by row. */
function placesOf(curves, width, pen) {
  let [left, row] = [10, 0];
  const items = curves.map(({ label, style }) => {
    const text = visible(label, 60);
    const wide = pen.measureText(text).width * 1.3 + 44;
    if (left > 10 && left + wide > width) [left, row] = [10, row + 1];
    const place = { label: text, style, left, row };
    left += wide;
    return place;
  });
  return { items, rows: items.length > 0 ? row + 1 : 0 };
}

/** A cell; what a spreadsheet would take for a formula begins with an apostrophe. */
function quoted(text) {
  const shown = visible(text, 200);
  return `"${/^\s*[=+\-@＝＋－＠]/.test(shown) ? "'" : ""}${shown.replaceAll('"', '""')}"`;
}

function save(title, kind, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${title.replace(/[^A-Za-z0-9@.-]+/g, "_").slice(0, 80) || "chart"}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
