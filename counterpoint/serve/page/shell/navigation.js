// The frame around a view: the top line, the list of jobs and runs at the side, and the tabs of a job or a run. The tabs follow
// from the views' paths: a view belongs to a run if its path has {run}, to a job if it has {job} only.
import { element, icon, keep, setAttribute, setChildren, setText } from "./dom.js";
import { visible, whole } from "./format.js";
import { stateOfJob } from "./overview.js";
import { link, parametersOf } from "./router.js";
import { chosenTheme } from "./theme.js";
import { toneOf } from "../widgets/badge.js";
import { changeName, nameOf } from "../widgets/name.js";

const RUNS_SHOWN = 40;
const SCOPES = [[], ["job"], ["job", "run"]];
const THEME_ICONS = {
  system: "M8 2v12M8 2a6 6 0 1 1 0 12a6 6 0 1 1 0-12M8 5h4M8 8h5.8M8 11h4",
  dark: "M13.5 9.5A5.8 5.8 0 0 1 6.5 2.5a5.8 5.8 0 1 0 7 7z",
  light: "M8 5a3 3 0 1 1 0 6a3 3 0 1 1 0-6M8 1v1.6M8 13.4V15M1 8h1.6M13.4 8H15M3 3l1.2 1.2M11.8 11.8L13 13M13 3l-1.2 1.2M4.2 11.8L3 13",
};
const ICON_MENU = "M2 4h12M2 8h12M2 12h12";
const ICON_REFRESH = "M13 8a5 5 0 1 1-1.6-3.7M13 2.5V5.5H10";

/** The frame. */
export class Navigation {
  /** @param {Array} views - All views, in the order of the tabs. */
  constructor(views) {
    this.views = views;
    this.parameters = {};
    this.address = null;
    this.overview = null;
    this.side = document.getElementById("side");
    this.filter = element("input", { type: "search", class: "side-filter", placeholder: "Find a run", "aria-label": "Find a job or run", on: { input: () => this.#draw() } });
    this.list = element("ul", { class: "side-list" });
    this.note = element("p", { class: "side-note" }, "Waiting for the list of jobs.");
    this.side.append(this.filter, this.list, this.note);
    addEventListener("keydown", (event) => event.key === "Escape" && this.#toggleMenu(false));
  }

  /** Draws the top line. */
  drawTop({ onTheme, onHelp, onRefresh }) {
    this.menu = element("button", { type: "button", class: "icon-button menu", "aria-label": "Jobs and runs", "aria-expanded": "false", "aria-controls": "side", on: { click: () => this.#toggleMenu() } }, icon(ICON_MENU));
    this.crumbs = element("nav", { class: "crumbs", "aria-label": "Where you are" });
    this.themeButton = element("button", { type: "button", class: "icon-button", on: { click: onTheme } });
    const lamp = element("span", { class: "lamp", role: "img", "aria-label": "not connected yet" });
    document.addEventListener("connection", ({ detail }) => setAttribute(lamp, "aria-label", detail === "connected" ? "connected" : detail));
    const refresh = element("button", { type: "button", class: "icon-button", "aria-label": "Refresh now", title: "Refresh now (r)", on: { click: onRefresh } }, icon(ICON_REFRESH));
    const help = element("button", { type: "button", class: "icon-button", "aria-label": "Show the keys", title: "Keys (?)", on: { click: onHelp } }, element("span", { "aria-hidden": "true" }, "?"));
    const brand = element("a", { class: "brand", href: "#/", "aria-label": "Counterpoint: overview" }, mark(), element("span", { class: "brand-name" }, "Counterpoint"));
    document.getElementById("top").append(this.menu, brand, this.crumbs, lamp, refresh, this.themeButton, help);
    this.showTheme(chosenTheme());
  }

  /** Shows the chosen theme at its button. */
  showTheme(theme) {
    const text = `Theme: ${theme === "system" ? "as the system" : theme}`;
    setChildren(this.themeButton, icon(THEME_ICONS[theme]));
    setAttribute(this.themeButton, "aria-label", text);
    setAttribute(this.themeButton, "title", `${text} (t)`);
  }

  /** Notes which view is open. */
  open(address) {
    this.address = address;
    this.parameters = address.parameters;
    this.#toggleMenu(false);
    const { job, run } = address.parameters;
    const parts = [job !== undefined && [job, this.target(this.#home(1)?.path)], run !== undefined && [run, this.target(this.#home(2)?.path)]].filter(Boolean);
    setChildren(this.crumbs, parts.map(([text, to]) => [element("span", { class: "crumb-separator", "aria-hidden": "true" }, "/"), to ? element("a", { href: to }, crumb(text)) : crumb(text)]));
    this.#draw();
  }

  /** Draws the tabs of the open view's job or run. */
  drawHead(head, { view }) {
    this.head = head;
    const names = parametersOf(view.path);
    const scope = names.includes("run") ? 2 : names.includes("job") ? 1 : 0;
    const tabs = this.#tabs(scope);
    if (tabs.length < 2) return setChildren(head);
    const current = view.tab ?? view.path;
    const items = tabs.map((tab) => element("a", { class: "tab", href: this.target(tab.path), "aria-current": tab.path === current ? "page" : null }, tab.title));
    setChildren(head, element("nav", { class: "tabs", "aria-label": scope === 2 ? "Views of the run" : "Views of the job" }, items));
    head.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  }

  /** The address of a view with the parameters of the open one; null if one is missing. */
  target(path) {
    if (!path || !parametersOf(path).every((name) => this.parameters[name] !== undefined)) return null;
    return link(path, this.parameters);
  }

  /** Brings the list at the side up to date. */
  update(overview) {
    const kindBefore = this.#kind();
    this.overview = overview;
    this.#draw();
    if (this.head && this.#kind() !== kindBefore) this.drawHead(this.head, this.address);
  }

  /** Puts the focus on the filter. */
  focusFilter() {
    this.#toggleMenu(true);
    this.filter.focus();
    this.filter.select();
  }

  /** Opens the next run, or the one before. */
  step(way) {
    const links = [...this.list.querySelectorAll("a.side-run")];
    const at = links.findIndex((one) => one.getAttribute("aria-current"));
    const next = links[at < 0 ? (way > 0 ? 0 : links.length - 1) : at + way];
    if (next) location.hash = next.getAttribute("href");
  }

  /** The views with tabs of a scope; of those for some kinds of jobs, the ones that fit the job. */
  #tabs(scope, job = this.parameters.job) {
    const wanted = SCOPES[scope].join();
    const kind = this.overview?.jobs.find((one) => one.job === job)?.kind;
    return this.views.filter((view) => !view.tab && parametersOf(view.path).join() === wanted && (!kind || !view.kinds || view.kinds.includes(kind)));
  }

  #home(scope, job = this.parameters.job) {
    return this.#tabs(scope, job)[0];
  }

  #toggleMenu(isOpen = this.side.dataset.open !== "true") {
    this.side.dataset.open = String(isOpen);
    if (this.menu) setAttribute(this.menu, "aria-expanded", String(isOpen));
  }

  /** The kind of the open view's job. */
  #kind() {
    return this.overview?.jobs.find((one) => one.job === this.parameters.job)?.kind;
  }

  /** The address of a job's first view. */
  homeOf(job) {
    return link((this.#home(1, job) ?? this.views[0]).path, { job });
  }

  /** A run's link leads to the same view of that run. */
  #runTarget(job, run) {
    const open = this.address?.view;
    const isOfRun = open && parametersOf(open.path).join() === SCOPES[2].join();
    const path = isOfRun ? open.path : this.#home(2)?.path;
    return path ? link(path, { job, run }) : null;
  }

  #draw() {
    if (!this.overview) return;
    const wanted = this.filter.value.trim().toLowerCase();
    const jobs = this.overview.jobs.map((job) => {
      const fits = (text) => String(text).toLowerCase().includes(wanted);
      const runs = wanted && !fits(job.job) ? job.runs.filter((run) => fits(run.run)) : job.runs;
      return { ...job, runs, isShown: !wanted || runs.length > 0 || fits(job.job) };
    });
    const shown = jobs.filter((job) => job.isShown);
    keep(this.list, shown, (job) => job.job, () => this.#makeJob(), (node, job) => this.#changeJob(node, job));
    setText(this.note, this.overview.jobs.length === 0 ? "No job is served." : shown.length === 0 ? "No job or run has this name." : "");
  }

  #makeJob() {
    return element("li", {}, element("a", { class: "side-job" }, dot(), nameOf("side-name")), element("ul", { class: "side-runs" }), element("p", { class: "side-note" }));
  }

  #changeJob(node, job) {
    const [head, runs, note] = node.children;
    const home = this.#home(1, job.job) ?? this.views[0];
    changeLink(head, job.job, stateOfJob(job), "", link(home.path, { job: job.job }), this.parameters.job === job.job && this.parameters.run === undefined);
    const first = job.runs.slice(0, RUNS_SHOWN);
    const open = job.runs.find((run) => this.parameters.job === job.job && run.run === this.parameters.run);
    if (open && !first.includes(open)) first.push(open);
    keep(runs, first, (run) => run.run, () => element("li", {}, element("a", { class: "side-run" }, dot(), nameOf("side-name"), element("span", { class: "side-step" }))), (item, run) =>
      changeLink(item.firstChild, run.run, run.state, run.step > 0 ? whole(run.step) : "", this.#runTarget(job.job, run.run), this.parameters.job === job.job && this.parameters.run === run.run));
    setText(note, job.runs.length > first.length ? `${whole(job.runs.length - first.length)} more: type to find one` : "");
  }
}

function changeLink(node, name, state, step, href, isCurrent) {
  setAttribute(node, "href", href ?? "#/");
  setAttribute(node, "aria-current", isCurrent ? "page" : null);
  setAttribute(node, "title", `${visible(name, 200)}: ${visible(state ?? "", 80)}`);
  node.children[0].dataset.tone = toneOf(state);
  changeName(node.children[1], name);
  if (node.children[2]) setText(node.children[2], step);
}

function crumb(text) {
  const name = nameOf();
  changeName(name, text);
  return name;
}

function dot() {
  return element("span", { class: "dot", "aria-hidden": "true" });
}

function mark() {
  const drawing = icon("M1 10.5c2.5 0 3-5.5 6-5.5s3.5 4 8 2M1 5.5c3 0 3.5 5.5 6.5 5.5s3.5-2.5 7-1");
  drawing.setAttribute("class", "icon brand-mark");
  return drawing;
}
