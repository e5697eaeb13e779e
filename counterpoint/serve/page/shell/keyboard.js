// Shortcuts: single keys, and `g` followed by a letter to go to a view. Silent while the reader types, or holds a modifier.

const SEQUENCE_MILLISECONDS = 1500;

/** The shortcuts of the page. */
export class Keyboard {
  constructor() {
    this.shortcuts = new Map();
    this.before = "";
    this.beforeTime = 0;
    document.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** Sets what `keys` does: one key (`?`), or two with a space between (`g r`). */
  set(keys, text, action) {
    this.shortcuts.set(keys, { text, action });
  }

  /** Forgets every shortcut that begins with `prefix`. */
  forget(prefix) {
    for (const keys of this.shortcuts.keys()) if (keys.startsWith(prefix)) this.shortcuts.delete(keys);
  }

  /** The shortcuts with their texts, for the help. */
  list() {
    return [...this.shortcuts].map(([keys, { text }]) => ({ keys, text }));
  }

  #onKey(event) {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (document.querySelector("dialog[open]")) return;
    if (event.target instanceof Element && event.target.closest("input, textarea, select, [contenteditable]")) return;
    const isSecond = event.timeStamp - this.beforeTime < SEQUENCE_MILLISECONDS;
    const found = (isSecond && this.before && this.shortcuts.get(`${this.before} ${event.key}`)) || this.shortcuts.get(event.key);
    this.before = found ? "" : event.key;
    this.beforeTime = event.timeStamp;
    if (!found) return;
    event.preventDefault();
    found.action();
  }
}
