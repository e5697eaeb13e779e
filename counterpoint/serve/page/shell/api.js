// Speaks with the server: GET with ETag, POST for changes, the token in the Authorization header. An answer that has not changed
// comes back as the same object, so that a view can see by identity that there is nothing to draw.

const CACHE_ENTRIES = 48;
const DEADLINE_SECONDS = 30;
const TOKEN_KEY = "counterpoint-token";

/** What the server refused, or that it could not be reached. */
export class ApiError extends Error {
  /**
   * @param {number} status - Of HTTP; 0 if there was no answer.
   * @param {{what?: string, where?: string, value?: *, expected?: string, advice?: string}} problem
   * @param {number} [retryAfter] - Seconds after which the server wants to be asked again.
   */
  constructor(status, problem, retryAfter = 0) {
    super(problem.what ?? `the server answered ${status}`);
    this.status = status;
    this.problem = problem;
    this.retryAfter = retryAfter;
  }

  /** Whether no server answered. */
  get isUnreachable() {
    return this.status === 0;
  }
}

/** The connection to the server of this page. */
export class Api {
  /** @param {function(string, Object): Promise<Response>} fetcher - `fetch`, or a test's. */
  constructor(fetcher = (url, options) => fetch(url, options)) {
    this.fetcher = fetcher;
    this.cache = new Map();
    this.token = takeToken();
  }

  /** Uses the token of the address, if it has one (`#token=...`); returns whether it has. It leaves the address, which becomes `hash`. */
  takeTokenOfAddress(hash) {
    const given = tokenOfAddress(hash);
    if (given) this.setToken(given);
    return Boolean(given);
  }

  /** Uses another token from now on, kept for this tab. */
  setToken(token) {
    this.token = token;
    this.cache.clear();
    remember(token);
  }

  /**
   * Gets a resource below `/api/v1`.
   *
   * @param {string} path - Such as `/jobs/a/runs/b`, its parts encoded (`fill`).
   * @param {Object} [query] - Parameters; those that are null, undefined or "" are left out, a list is repeated.
   * @param {AbortSignal} [signal]
   * @returns {Promise<*>} The parsed answer, the same object while it has not changed.
   */
  async get(path, query = {}, signal = undefined) {
    const url = address(path, query);
    const known = this.cache.get(url);
    const headers = known ? { "If-None-Match": known.tag } : {};
    const response = await this.#send(url, { method: "GET", headers, signal });
    if (response.status === 304 && known) {
      this.cache.delete(url);
      this.cache.set(url, known); // the most recently used last
      return known.data;
    }
    const data = await parse(response);
    const tag = response.headers.get("ETag");
    this.cache.delete(url);
    if (tag) this.cache.set(url, { tag, data });
    if (this.cache.size > CACHE_ENTRIES) this.cache.delete(this.cache.keys().next().value);
    return data;
  }

  /** Posts a change; returns the parsed answer. It may take `seconds`. */
  async post(path, body = {}, seconds = DEADLINE_SECONDS) {
    const headers = { "Content-Type": "application/json" };
    const response = await this.#send(address(path, {}), { method: "POST", headers, body: JSON.stringify(body) }, seconds);
    return parse(response);
  }

  async #send(url, options, seconds = DEADLINE_SECONDS) {
    const headers = { Accept: "application/json", ...options.headers };
    if (this.token) headers.Authorization = `Bearer ${this.token}`;
    const deadline = AbortSignal.timeout(seconds * 1000);
    const signal = options.signal ? AbortSignal.any([options.signal, deadline]) : deadline;
    let response;
    try {
      response = await this.fetcher(url, { ...options, headers, signal, cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (options.signal?.aborted) throw error;
      throw new ApiError(0, unreachable(deadline.aborted ? seconds : 0));
    }
    if (response.ok || response.status === 304) return response;
    throw new ApiError(response.status, await problemOf(response), Number(response.headers.get("Retry-After")) || 0);
  }
}

/** Fills a template such as `/jobs/{job}` with encoded parameters. */
export function fill(template, parameters) {
  return template.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(parameters[name]));
}

function address(path, query) {
  const url = new URL(`api/v1${path}`, document.baseURI);
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") url.searchParams.append(name, String(one));
    }
  }
  return url.href;
}

async function parse(response) {
  try {
    return await response.json();
  } catch {
    throw new ApiError(0, { what: "The server's answer was cut off", advice: "The page asks again by itself." });
  }
}

async function problemOf(response) {
  const otherwise = { what: `The server answered ${response.status} ${response.statusText}`.trim() };
  try {
    const { error } = await response.json();
    return error && typeof error === "object" ? error : otherwise;
  } catch {
    return otherwise;
  }
}

function unreachable(seconds) {
  return seconds > 0
    ? { what: `The server has not answered within ${seconds} s`, advice: "Its disk or machine may be busy. The page asks again by itself." }
    : { what: "The server cannot be reached", advice: "Is `counterpoint serve` running? Training does not depend on it." };
}

/** The token of the address (`#token=...`), which leaves the address at once, or else the one this tab has kept. */
function takeToken() {
  const given = tokenOfAddress("");
  if (given) remember(given);
  try {
    return given || (sessionStorage.getItem(TOKEN_KEY) ?? "");
  } catch {
    return given;
  }
}

/** The token of the address, or "". The address is then without it, and ends with `hash`. */
function tokenOfAddress(hash) {
  const given = /^#token=([^&]+)/.exec(location.hash);
  if (!given) return "";
  history.replaceState(null, "", location.pathname + location.search + hash);
  try {
    return decodeURIComponent(given[1]);
  } catch {
    return given[1]; // no percent-encoding: as it is, and the server refuses it
  }
}

function remember(token) {
  try {
    sessionStorage.setItem(TOKEN_KEY, token);
  } catch {
    // Without storage the token lasts until the page is loaded again.
  }
}
