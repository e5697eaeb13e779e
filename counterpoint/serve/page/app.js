// The page's beginning: it knows the views, the server and the keys, draws the frame around a view, and asks for news every two
// seconds. A view (views/index.js says what one is) draws itself; shell/ and widgets/ know nothing of jobs.
import { Api } from "./shell/api.js";
import { connectionLine } from "./shell/connection.js";
import { element, setChildren } from "./shell/dom.js";
import { errorPanel } from "./shell/errors.js";
import { Keyboard } from "./shell/keyboard.js";
import { Navigation } from "./shell/navigation.js";
import { Poller } from "./shell/poller.js";
import { grouped } from "./shell/overview.js";
import { link, route } from "./shell/router.js";
import { chosenTheme, switchTheme } from "./shell/theme.js";
import { closeDialog } from "./widgets/dialog.js";
import { askForToken } from "./shell/token_dialog.js";
import { showHelp } from "./shell/help.js";
import { visible } from "./shell/format.js";
import { views } from "./views/index.js";

const INTERVAL_SECONDS = 2;
const OVERVIEW = "/overview";

/** The page. One exists, `application`, so that a test can ask it for news without waiting. */
class Application {
  constructor() {
    this.api = new Api();
    this.keyboard = new Keyboard();
    this.navigation = new Navigation(views);
    this.answer = null;
    this.overview = null;
    this.shown = null;
    this.askingForToken = null;
    this.updating = Promise.resolve();
    this.poller = new Poller({ interval: INTERVAL_SECONDS, ask: () => this.#ask(), onState: connectionLine(() => this.poller.now(), () => this.poller.resume()) });
  }

  /** Draws the frame and begins to ask. */
  start() {
    this.navigation.drawTop({ onTheme: () => this.#switchTheme(), onHelp: () => this.#help(), onRefresh: () => this.poller.now() });
    document.getElementById("skip-link").addEventListener("click", (event) => {
      event.preventDefault();
      document.getElementById("main").focus();
    });
    this.#setShortcuts();
    addEventListener("hashchange", (event) => this.#onAddress(event));
    this.#open(false);
  }

  /** Asks for news once, now. */
  poll() {
    return this.poller.now();
  }

  /** What a view may use. `address` is the route that it was opened with. */
  #context(address, signal) {
    return {
      parameters: address.parameters,
      query: address.query,
      signal,
      link,
      /** The address of a job's first view. */
      homeOf: (job) => this.navigation.homeOf(job),
      /** All jobs and runs as `shell/overview.js` groups them, with the time now; null before the first answer. */
      overview: () => this.overview,
      /** Gets a resource; the same object while it has not changed. */
      get: (path, query) => this.api.get(path, query, signal),
      /** Asks for a change that may take `seconds`, and then for news. */
      change: async (path, body, seconds) => {
        const answer = await this.api.post(path, body, seconds);
        this.poller.now();
        return answer;
      },
      /** Whether the token may change anything. */
      mayChange: () => this.session?.access === "change",
      /** Changes the query of the address, without opening the view anew. */
      setQuery: (changes) => {
        Object.assign(address.query, changes);
        history.replaceState(null, "", link(address.view.path, address.parameters, address.query));
      },
      /** Sets what the view does at a key as long as it is open. */
      shortcut: (key, text, action) => {
        this.keyboard.set(key, text, action);
        signal.addEventListener("abort", () => this.keyboard.forget(key));
      },
      /** Reads a text out to those who do not see the page. */
      announce: (text) => {
        document.getElementById("announcer").textContent = text;
      },
      /** Asks for news now: after the view has changed what it wants. */
      refresh: () => this.poller.now(),
    };
  }

  /** Opens another view; a link with a token that was pasted into the open page logs in, and the view stays. */
  #onAddress(event) {
    if (!this.api.takeTokenOfAddress(new URL(event.oldURL).hash)) return this.#open(true);
    this.session = null;
    this.answer = null;
    this.#open(false);
  }

  #open(isMove) {
    this.#close();
    const address = route(views, location.hash || "#/");
    const [root, head, problem] = ["view", "view-head", "view-error"].map((id) => document.getElementById(id));
    root.replaceChildren();
    setChildren(problem);
    this.navigation.open(address);
    if (!address.view) {
      setChildren(head);
      root.replaceChildren(element("p", { class: "empty" }, "There is no such view. ", element("a", { href: "#/" }, "Go to the overview")));
      return;
    }
    const names = Object.values(address.parameters).map((value) => visible(value, 40));
    document.title = [address.view.title, ...names.reverse(), "Counterpoint"].join(" · ");
    const abort = new AbortController();
    this.navigation.drawHead(head, address);
    this.shown = { address, abort, view: null };
    this.#guard(() => {
      this.shown.view = address.view.render(root, this.#context(address, abort.signal));
    });
    if (isMove) {
      document.getElementById("main").focus({ preventScroll: true });
      scrollTo(0, 0);
    }
    this.poller.now();
  }

  #close() {
    this.shown?.abort.abort();
    try {
      this.shown?.view?.destroy();
    } catch (error) {
      console.error(error);
    }
    this.shown = null;
  }

  /** One round: what all views share, then the open view. Throws if the server cannot be reached. */
  async #ask() {
    const problem = (await this.#attempt(() => this.#askForShared())) ?? (await this.#updateView());
    if (problem) return this.#onError(problem);
    if (this.askingForToken) closeDialog(); // another token came by the address
    setChildren(document.getElementById("view-error"));
  }

  async #askForShared() {
    this.session ??= await this.api.get("/session");
    const answer = await this.api.get(OVERVIEW);
    if (answer !== this.answer) {
      this.answer = answer;
      this.overview = grouped(answer);
      this.navigation.update(this.overview);
    } else this.overview.time = Date.now() / 1000;
  }

  /** Updates the open view; if another one was opened meanwhile, that one. Returns what went wrong. */
  async #updateView() {
    let shown = null;
    let problem = null;
    while (shown !== this.shown) {
      shown = this.shown;
      problem = await this.#attempt(() => shown?.view?.update());
      if (shown !== this.shown) problem = null;
    }
    return problem;
  }

  async #attempt(action) {
    try {
      await action();
      return null;
    } catch (error) {
      return error;
    }
  }

  /** Shows an error where it belongs, and throws it on if it means that there is no connection. */
  #onError(error) {
    if (error.status === 401) {
      this.session = null;
      this.askingForToken ??= askForToken(this.api).finally(() => {
        this.askingForToken = null;
        this.poller.now();
      });
      return;
    }
    if (error.isUnreachable || [429, 502, 503, 504].includes(error.status)) throw error;
    if (!error.problem) console.error(error);
    setChildren(document.getElementById("view-error"), errorPanel(error));
  }

  #guard(action) {
    try {
      action();
    } catch (error) {
      this.#onError(error);
    }
  }

  #setShortcuts() {
    const go = (path) => () => {
      const to = this.navigation.target(path);
      if (to) location.hash = to;
    };
    for (const view of views) if (view.key) this.keyboard.set(`g ${view.key}`, `Go to ${view.title}`, go(view.path));
    this.keyboard.set("/", "Find a job or run", () => this.navigation.focusFilter());
    this.keyboard.set("j", "Next run", () => this.navigation.step(1));
    this.keyboard.set("k", "Previous run", () => this.navigation.step(-1));
    this.keyboard.set("r", "Refresh now", () => this.poller.now());
    this.keyboard.set("p", "Pause or resume the updates", () => (this.poller.paused ? this.poller.resume() : this.poller.pause()));
    this.keyboard.set("t", "Switch the theme", () => this.#switchTheme());
    this.keyboard.set("?", "Show the keys", () => this.#help());
  }

  #switchTheme() {
    switchTheme();
    this.navigation.showTheme(chosenTheme());
  }

  #help() {
    showHelp(this.keyboard.list());
  }
}

export const application = new Application();
application.start();
