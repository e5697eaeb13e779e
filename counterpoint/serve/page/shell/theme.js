// The switch between the system's theme, dark and light, and the resolved colours that canvases need: they cannot use CSS variables.

const THEMES = ["system", "dark", "light"];
const listeners = new Set();

/** The chosen theme: `system`, `dark` or `light`. */
export function chosenTheme() {
  return document.documentElement.dataset.theme ?? "system";
}

/** Switches to the next theme, keeps the choice, and returns it. */
export function switchTheme() {
  const next = THEMES[(THEMES.indexOf(chosenTheme()) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  try {
    if (next === "system") localStorage.removeItem("theme");
    else localStorage.setItem("theme", next);
  } catch {
    // Without storage the choice lasts until the page is loaded again.
  }
  changed();
  return next;
}

/** Calls `listener` whenever the colours change; returns what ends that. */
export function onThemeChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

const colours = new Map();
let probe = null;

/** A colour of the theme as the browser computes it, such as `colour("--series-1")`. */
export function colour(variable) {
  if (!colours.has(variable)) {
    probe ??= document.body.appendChild(Object.assign(document.createElement("span"), { className: "colour-probe", hidden: true }));
    probe.style.color = `var(${variable})`;
    colours.set(variable, getComputedStyle(probe).color);
  }
  return colours.get(variable);
}

/** The same colour with an opacity, for bands. */
export function translucent(variable, opacity) {
  const parts = colour(variable).match(/[\d.]+/g);
  return parts ? `rgba(${parts[0]}, ${parts[1]}, ${parts[2]}, ${opacity})` : colour(variable);
}

function changed() {
  colours.clear();
  for (const listener of listeners) listener();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
