// Asks for news at an interval: pauses while nobody looks, waits longer after each failure, and says since when there is no
// connection. One question is under way at a time.

const LONGEST_WAIT_SECONDS = 30;
const LONGEST_RETRY_SECONDS = 300;

/** Calls a function again and again. */
export class Poller {
  /**
   * @param {Object} options
   * @param {number} options.interval - Seconds between the end of a call and the next.
   * @param {function(): Promise<void>} options.ask - Throws an `ApiError` when it failed.
   * @param {function(Object): void} options.onState - Told `{state, since, next, error}` after every call; `state` is
   *   `connected`, `unreachable` or `paused`, `next` the moment of the next call in milliseconds.
   */
  constructor({ interval, ask, onState }) {
    Object.assign(this, { interval, ask, onState });
    this.failures = 0;
    this.wait = interval;
    this.since = null;
    this.paused = false;
    this.timer = null;
    this.asking = null;
    this.again = false;
    document.addEventListener("visibilitychange", () => this.#onVisibility());
    window.addEventListener("online", () => this.now());
  }

  /** Asks now. If a question is under way, its answer may be of before; so another one follows it. */
  async now() {
    clearTimeout(this.timer);
    if (this.asking) {
      this.again = true;
      return this.asking;
    }
    this.asking = this.#rounds().finally(() => {
      this.asking = null;
      this.#plan();
    });
    return this.asking;
  }

  /** Stops asking until `resume`, whether the page is seen or not. */
  pause() {
    this.paused = true;
    clearTimeout(this.timer);
    this.onState({ state: "paused", since: this.since, next: null, error: null });
  }

  /** Asks again. */
  resume() {
    this.paused = false;
    return this.now();
  }

  async #rounds() {
    do {
      this.again = false;
      await this.#once();
    } while (this.again && this.failures === 0);
  }

  async #once() {
    try {
      await this.ask();
      this.failures = 0;
      this.wait = this.interval;
      this.since = null;
      if (!this.paused) this.onState({ state: "connected", since: null, next: null, error: null });
    } catch (error) {
      this.failures += 1;
      this.since ??= Date.now();
      const wait = Math.min(this.interval * 2 ** Math.min(this.failures, 10), LONGEST_WAIT_SECONDS);
      this.wait = Math.max(wait, Math.min(error.retryAfter ?? 0, LONGEST_RETRY_SECONDS));
      this.onState({ state: this.paused ? "paused" : "unreachable", since: this.since, next: Date.now() + this.wait * 1000, error });
    }
  }

  #plan() {
    if (this.paused || document.hidden) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.now(), this.wait * 1000);
  }

  #onVisibility() {
    if (document.hidden) clearTimeout(this.timer);
    else if (!this.paused) this.now();
  }
}
