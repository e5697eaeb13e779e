"""`counterpoint servers`: lists, drains and adds the inference servers of a live job, for all its runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cli.steering.arguments import parser_of, show
from job.admin.servers import ServerWish, add_server, drain_server, list_servers, remove_server, undrain_server
from serve.readers.activity.fleet import join, read_views
from transport.errors import UserError

CHANGES = {
    "drain": (drain_server, "is drained: it finishes the requests that it has"),
    "undrain": (undrain_server, "takes requests again once it has proven its weights"),
    "add": (add_server, "is added: it takes requests once it answers and has proven its weights"),
}


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError`."""
    parser = parser_of(
        "servers",
        "Lists the inference servers of a job, or changes them for all its runs. A drained server finishes what it has; an added "
        "one takes requests once it has proven its weights.",
        run=False,
    )
    parser.add_argument("verb", nargs="?", default="list", choices=["list", *CHANGES, "remove"])
    parser.add_argument("url", nargs="?", metavar="URL", help="http://HOST:PORT")
    given = parser.parse_intermixed_args(arguments)  # --job may stand anywhere
    if given.verb == "list":
        found = [asdict(wish) | seen for wish, seen in _seen(given.job, list_servers(given.job))]
        lines = "\n".join(map(_sentence, found))
        return show(given, found, lines or "no server is named: the job looks them up by inference.dns")
    if given.url is None:
        raise UserError(f"servers {given.verb}: which URL?")
    if given.verb == "remove":
        remove_server(given.job, given.url)
        return show(given, {"url": given.url, "removed": True}, f"{given.url} is removed")
    change, outcome = CHANGES[given.verb]
    wish = change(given.job, given.url)
    return show(given, wish, f"{wish.url} {outcome}; `counterpoint servers --job {given.job}` shows its state")


def _seen(job: Path, wishes: list[ServerWish]) -> Iterator[tuple[ServerWish, dict[str, str]]]:
    """Yields each server with its state and the reason for it, as the job's runs see it now."""
    now = time.time()
    servers = {server.url: server for server in join(view for view in read_views(job) if view.is_current(now))}
    for wish in wishes:
        server = servers.get(wish.url)
        state, reason = (server.state, server.reason) if server is not None else ("not seen", "")
        yield wish, {"state": state, "reason": reason}


def _sentence(server: dict[str, Any]) -> str:
    state = "no run has looked at it yet" if server["state"] == "not seen" else server["state"]
    parts = [f"{state}: {server['reason']}" if server["reason"] else state]
    parts += ["drained"] if server["drained"] and server["state"] != "draining" else []
    parts += ["added by its operator"] if server["origin"] == "added" else []
    return f"{server['url']}  {', '.join(parts)}"
