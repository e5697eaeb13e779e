"""The commands that steer a live job: the verbs of `counterpoint/job/admin/verbs.py`, `note`, `join` and `servers`.

All take `--job` and `--json`. What carries a verb out is imported once it is asked for: `change` and `join` read configurations.
"""

from __future__ import annotations

import argparse
import json
from inspect import signature
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from counterpoint.cli.arguments.job import add_job, job_of
from counterpoint.job.admin.ask import checked
from counterpoint.job.admin.verbs import RUN_VERBS, SERVER_VERBS
from counterpoint.transport.configuration.docstrings import docstring_of
from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import printable

OF_EVERY_REQUEST = ("kind", "request_id")
"""Fields of a request that no flag is for."""

VERBS = {verb.name: verb for verb in RUN_VERBS}


def run_verb(name: str, arguments: list[str]) -> int:
    """`counterpoint VERB RUN`: does something to one run. Raises `UserError`."""
    verb = VERBS[name]
    function, fields = verb.load(), verb.fields()
    parser = _parser(name, verb.explanation)
    parser.add_argument("run", metavar="RUN", help="the run's id")
    _add_common(parser)
    own = [each for each in fields.model_fields if each not in OF_EVERY_REQUEST]
    for each in own:
        _add_field(parser, fields, each)
    default = signature(function).parameters["wait_seconds"].default
    parser.add_argument(
        "--timeout",
        type=float,
        default=default,
        metavar="SECONDS",
        help="how long to wait for the answer (default: %(default)g)",
    )
    given = parser.parse_intermixed_args(arguments)  # --job may stand anywhere
    values = {each: getattr(given, each) for each in own}
    if "changes" in values:
        if not values["changes"]:
            return _list_changeable(given)
        values["changes"] = dict(map(_pair, values["changes"]))
    asked = checked(fields, given.run, **values)
    done = function(job_of(given), given.run, asked, given.timeout)
    return _show(given, done.model_dump(exclude={"sentence"}), done.sentence)


def _add_field(parser: argparse.ArgumentParser, fields: type[BaseModel], name: str) -> None:
    field = fields.model_fields[name]
    text = docstring_of(fields, name).removesuffix(".")
    text = text[:1].lower() + text[1:]
    if name == "changes":
        text = f"{text}; JSON or a word. Without any, the keys that may change are listed, with the values of the next step"
        parser.add_argument(name, nargs="*", metavar="KEY=VALUE", help=text)
    elif field.annotation is float:
        parser.add_argument(f"--{name}", type=float, default=field.default, help=f"{text} (default: %(default)g)")
    else:
        parser.add_argument(f"--{name}", default=field.default, help=text)


def _list_changeable(given: argparse.Namespace) -> int:
    from counterpoint.job.admin.change import changeable_values

    values = changeable_values(job_of(given), given.run)
    return _show(given, values, "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()))


def _pair(word: str) -> tuple[str, Any]:
    key, separator, value = word.partition("=")
    if not separator or not key:
        raise UserError(f"change: {word}: expected KEY=VALUE, such as sampling.temperature=0.8")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):  # a word; likewise a number of 5,000 digits, which the run refuses
        return key, value


def servers(arguments: list[str]) -> int:
    """`counterpoint servers [VERB URL]`: lists the inference servers of a live job, or does something to one, for all its runs.

    Raises `UserError`.
    """
    from counterpoint.job.admin.servers import await_use, list_servers

    verbs = {verb.name: verb for verb in SERVER_VERBS}
    parser = _parser(
        "servers",
        "Lists the inference servers of a job, or changes them for all its runs. A drained server finishes what it has; an added "
        "one takes requests once it is proven to compute with the runs' weights.",
    )
    _add_common(parser)
    parser.add_argument("verb", nargs="?", default="list", choices=["list", *verbs])
    parser.add_argument("url", nargs="?", metavar="URL", help="http://HOST:PORT")
    given = parser.parse_intermixed_args(arguments)
    if given.verb == "list":
        found = list_servers(job_of(given))
        nothing = "no server is named: the job looks them up by inference.dns"
        return _show(given, found, "\n".join(server.sentence for server in found) or nothing)
    if given.url is None:
        raise UserError(f"servers {given.verb}: which URL?")
    server = verbs[given.verb].load()(job_of(given), given.url)
    if server is None:
        return _show(given, {"url": given.url, "removed": True}, f"{given.url} is removed")
    if not server.drained:
        server = await_use(job_of(given), server.url)
    return _show(given, server, server.sentence)


def join(arguments: list[str]) -> int:
    """`counterpoint join FILE`: starts a guest of a live job as a process of its own, and returns. Raises `UserError`.

    `counterpoint orchestrator FILE --join DIRECTORY` runs one in the foreground.
    """
    from counterpoint.job.admin.join import join_run
    from counterpoint.transport.configuration.toml_file import read_portable_text

    parser = _parser("join", "Starts a run of its own in a live job, detached from this terminal.")
    _add_common(parser)
    parser.add_argument("file", type=Path, metavar="FILE", help="the run's file, as of `counterpoint orchestrator`")
    parser.add_argument("--resume", action="store_true", help="go on with a run that has ended")
    given = parser.parse_args(arguments)
    joined = join_run(job_of(given), read_portable_text(given.file), name=str(given.file), resume=given.resume)
    return _show(given, joined, f"run {joined.run_id} has joined (process {joined.pid}); its log: {joined.log}")


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(prog=f"counterpoint {command}", description=description, allow_abbrev=False)


def _add_common(parser: argparse.ArgumentParser) -> None:
    add_job(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON, for programs")


def _show(given: argparse.Namespace, result: object, sentence: str) -> int:
    """Prints the result, as a sentence or as JSON. Returns 0."""
    print(json.dumps(result, default=_plain) if given.json else printable(sentence))
    return 0


def _plain(value: BaseModel | Path) -> Any:
    """What JSON has for the values of a result."""
    return value.model_dump() if isinstance(value, BaseModel) else str(value)
