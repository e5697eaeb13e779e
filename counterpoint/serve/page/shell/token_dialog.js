// Asks for the token when the server refuses the one at hand. The server's own answer decides whether the new one is right.
import { ApiError } from "./api.js";
import { element } from "./dom.js";
import { field, openDialog } from "../widgets/dialog.js";

/** Opens the dialog; resolves when a token was accepted or the reader gave up. */
export function askForToken(api) {
  const hadToken = Boolean(api.token);
  return openDialog({
    title: hadToken ? "The token was refused" : "This page needs a token",
    confirm: "Use this token",
    body: [
      element("p", { class: "dialog-lead" }, hadToken ? "The server does not know the token that this page has: it may be of another server, or have been replaced." : "The server shows a job only to those who have its token."),
      element("p", { class: "muted" }, "The server prints an address with the token when it starts. The token is also in a file, by default in ", element("code", {}, "serve/"), " of the first job's directory."),
      field({ name: "token", label: "Token", type: "password", autocomplete: "off", spellcheck: "false", required: true }),
    ],
    act: async ({ token }) => {
      const before = api.token;
      api.setToken(token.trim());
      try {
        return await api.get("/session");
      } catch (problem) {
        api.setToken(before);
        if (problem.status !== 401) throw problem;
        throw new ApiError(401, { what: "This token was refused, too", where: "token", expected: "the text of the token's file, without spaces", advice: "Copy it once more." });
      }
    },
  });
}
