// Turns numbers, times and hostile names into short texts. Everything that the page shows as a number passes here, so that a
// value that is missing or no number reads the same everywhere.

/** What stands for a value that is not known. */
export const UNKNOWN = "–";

/** A number in four significant digits: 0.01234, 12.34, 1,234; very large and very small ones with an exponent. */
export function number(value, digits = 4) {
  if (typeof value !== "number" || !Number.isFinite(value)) return value === undefined || value === null ? UNKNOWN : String(value).slice(0, 24);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9 || size < 1e-4) return value.toExponential(Math.max(0, digits - 2)).replace("-", "−").replace("e+", "e");
  if (Number.isInteger(value) || size >= 10 ** (digits - 1)) return whole(value);
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(decimals, 8)).replace("-", "−");
}

/** A whole number with separators between thousands. */
export function whole(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return UNKNOWN;
  return Math.round(value).toLocaleString("en-US").replace("-", "−");
}

/** A large count in short: 950, 12.3k, 4.56M. */
export function count(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size < 10000) return number(value, size < 1000 && !Number.isInteger(value) ? 3 : 4);
  for (const [limit, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (size >= limit) return number(value / limit, 3) + unit;
  return number(value);
}

/** Seconds with a unit that suits them: 3.2 ms, 1.25 s, 4 min 10 s, 3 h 05 min, 2 d 4 h. */
export function seconds(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return UNKNOWN;
  if (value < 0) return `−${seconds(-value)}`;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${number(value * 1e6, 2)} µs`;
  if (value < 1) return `${number(value * 1e3, 3)} ms`;
  if (value < 60) return `${number(value, 3)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 60) return `${minutes} min ${pad(value % 60)} s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${pad(minutes % 60)} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Seconds in one unit, for what is only an estimate: 40 s, 16 min, 3.1 h, 2.5 d. */
export function roughly(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return UNKNOWN;
  const [size, unit, digits] = value < 60 ? [1, "s", 2] : value < 3600 ? [60, "min", 2] : value < 172_800 ? [3600, "h", 2] : [86_400, "d", 2];
  return `${number(size < 3600 ? Math.round(value / size) : value / size, digits)} ${unit}`;
}

/** Bytes with a unit. */
export function bytes(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return UNKNOWN;
  for (const [limit, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (Math.abs(value) >= limit) return `${number(value / limit, 3)} ${unit}`;
  }
  return `${whole(value)} B`;
}

/** A share as a percentage; next to nothing is `< 0.01 %`. */
export function percent(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return UNKNOWN;
  return value > 0 && value < 1e-4 ? "< 0.01 %" : `${number(value * 100, 3)} %`;
}

/** A moment (unix seconds) as the reader's clock shows it; with the day if it is not today's. */
export function clock(time, now = Date.now() / 1000) {
  if (typeof time !== "number" || !Number.isFinite(time)) return UNKNOWN;
  const moment = new Date(time * 1000);
  if (Number.isNaN(moment.getTime())) return UNKNOWN;
  const hours = moment.toLocaleTimeString("en-GB");
  return moment.toDateString() === new Date(now * 1000).toDateString() ? hours : `${moment.toLocaleDateString("en-CA")} ${hours}`;
}

/** How long ago a moment was, in its largest unit: it grows while it is read. */
export function ago(time, now) {
  if (typeof time !== "number" || !Number.isFinite(time)) return UNKNOWN;
  const passed = Math.max(0, now - time);
  if (passed < 3) return "now";
  const [size, unit] = passed < 60 ? [1, "s"] : passed < 3600 ? [60, "min"] : passed < 172_800 ? [3600, "h"] : [86_400, "d"];
  return `${whole(Math.floor(passed / size))} ${unit} ago`;
}

/**
 * A text of a job in one short line: control characters and those that turn the direction of writing are shown as code points,
 * so that a name cannot pretend to be another one.
 */
export function visible(text, limit = 120) {
  if (text === undefined || text === null) return UNKNOWN;
  const short = String(text).slice(0, limit + 1);
  const cut = short.length > limit ? `${short.slice(0, limit)}…` : short;
  return cut.replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, (character) =>
    character === "\n" ? " " : `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** A longer text, of several lines perhaps, cut at a bound. */
export function passage(text, limit = 4000) {
  const given = String(text ?? "");
  return given.length > limit ? `${given.slice(0, limit)}… (${whole(given.length - limit)} more characters)` : given;
}

function pad(value) {
  return String(Math.floor(value)).padStart(2, "0");
}
