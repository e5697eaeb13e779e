"""`counterpoint servers`: lists, drains and adds the inference servers of a live job, for all its runs."""

from __future__ import annotations

from cli.arguments.job import job_of
from cli.steering.arguments import parser_of, show
from job.admin.servers import (
    JobServer,
    add_server,
    await_use,
    drain_server,
    list_servers,
    remove_server,
    undrain_server,
)
from transport.errors import UserError

CHANGES = {"drain": drain_server, "undrain": undrain_server, "add": add_server}


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
        found = list_servers(job_of(given))
        return show(
            given,
            found,
            "\n".join(map(_sentence, found)) or "no server is named: the job looks them up by inference.dns",
        )
    if given.url is None:
        raise UserError(f"servers {given.verb}: which URL?")
    if given.verb == "remove":
        remove_server(job_of(given), given.url)
        return show(given, {"url": given.url, "removed": True}, f"{given.url} is removed")
    server = CHANGES[given.verb](job_of(given), given.url)
    if not server.drained:
        server = await_use(job_of(given), server.url)
    return show(given, server, _sentence(server))


def _sentence(server: JobServer) -> str:
    origin = "" if server.origin == "job" else ", added by its operator"
    return f"{server.url}  {_use_of(server)}{origin}"


def _use_of(server: JobServer) -> str:
    """Whether the runs use it, and if not, why and until when."""
    if server.drained:
        return "drained" + (f", and out of service ({server.reason})" if server.state == "out" else "")
    if server.state == "serving":
        return "in use"
    some = f"in use by {', '.join(server.used_by)}, and not by every run" if server.used_by else "not in use"
    advice = {"out": "; used once it answers and has proven its weights", "loading": "; used once they are proven"}
    return f"{some}: {server.reason}{advice.get(server.state, '')}"
