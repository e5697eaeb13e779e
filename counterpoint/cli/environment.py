"""`counterpoint env check JOB.toml` plays environments alone, and says what training would meet; `env new NAME` writes one."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from counterpoint.job.environments.new_environment import write_environment
from counterpoint.transport.errors import UserError
from counterpoint.transport.exact_json import MAX_WRITTEN_DEPTH, JsonError, dumps, loads
from counterpoint.transport.process.extras import SERVING, require

if TYPE_CHECKING:
    from counterpoint.environments.base import Environment
    from counterpoint.environments.config import EnvironmentConfig
    from counterpoint.environments.sampling import SamplingConfig
    from counterpoint.inference.config import InferenceConfig, PoolConfig
    from counterpoint.inference.pool.pool import Served
    from counterpoint.job.environments.findings import Finding
    from counterpoint.job.environments.observe import Observations

FOUND = 1
"""The exit code when something would break in training."""

MODEL = "tiny-dense"
START_SECONDS = 300.0
READING_SECONDS = 300.0
"""How long an environment may take to be imported and constructed, and its examples to be read, as long as its start."""
LINES_SHOWN = 15
"""The last lines of a server's log that are shown when it ends."""
DEADLINE_SECONDS = 60.0
MOST_ROLLOUTS = 8

USAGE = """usage: counterpoint env check JOB.toml [--server URL] [--section.key VALUE]...
       counterpoint env check KIND [--args JSON] [--model MODEL] [--server URL] ...
       counterpoint env new NAME [--directory DIRECTORY]

check  plays a job's environments, or one KIND, against a real server, and prints a transcript and what would break in training
new    writes an environment that works, its test, and a file that trains on it

`counterpoint env check --help` and `counterpoint env new --help` say more."""


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` for an environment that cannot be loaded, and for a server that does not start."""
    commands = {"check": _check, "new": _new}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] not in commands:
        raise UserError(f"env: there is no command {arguments[0]!r}; there are check and new")
    return commands[arguments[0]](arguments[1:])


def _new(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="counterpoint env new",
        description="Writes NAME.py, test_NAME.py and NAME.toml: an environment that works, its test, and a job for it.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="the module's name, such as my_sums")
    parser.add_argument("--directory", type=Path, default=Path(), help="where to write (default: here)")
    given = parser.parse_args(arguments)
    for path in write_environment(given.name, given.directory):
        print(path)
    prefix = "" if given.directory.samefile(".") else f"cd {given.directory} && "
    print(f"next: {prefix}counterpoint env check {given.name}.toml")
    return 0


@dataclass(frozen=True, slots=True)
class _Plays:
    """What is played, and what answers."""

    environments: list[tuple[EnvironmentConfig, SamplingConfig]]
    servers: Callable[[Path], tuple[str, PoolConfig, InferenceConfig | None, dict[str, str]]]
    """Resolves the model; returns its directory, where to ask, and the server to start with its variables, if one is. It gets a
    directory for the server's files."""
    rollouts: int = 4
    at_once: int = 128
    opponents: Sequence[str] = ()
    next: str = ""
    """What to type after a check without an error."""


def _check(arguments: list[str]) -> int:
    given, others = _check_parser().parse_known_args(arguments)
    from counterpoint.environments.workers.load import load_environment
    from counterpoint.job.environments.examples import fault_of_examples
    from counterpoint.job.environments.findings import Level, findings
    from counterpoint.job.environments.waiting import ending

    logging.basicConfig(level=logging.WARNING, format="%(levelname)-7s %(message)s", stream=sys.stderr)
    plays = (_of_job if given.kind.endswith(".toml") else _of_kind)(given, others)
    if plays is None:
        return 0
    loaded: list[Environment] = []
    for config, _ in plays.environments:  # before a model is built and a server starts: its errors are there at once
        try:
            with ending(f"loading {config.kind}", _say, READING_SECONDS):
                loaded.append(load_environment(config))
            with ending("reading its examples", _say, READING_SECONDS):
                fault = fault_of_examples(loaded[-1])
        except (TimeoutError, ValueError) as error:
            raise UserError(str(error)) from None
        if fault is not None:
            raise UserError(f"environment {config.kind!r}: {fault}")
    found: list[Finding] = []
    lines: list[dict[str, str]] = []
    for seen, model in _played(given, plays, loaded):
        found += (its_own := findings(seen))
        lines += [{"environment": seen.name, "check": f.check, "level": f.level, "text": f.text} for f in its_own]
        if not given.json:
            _print(seen, its_own, Path(model), given.full)
    if given.json:
        print(orjson.dumps(lines).decode())
    if any(finding.level is Level.ERROR for finding in found):
        return FOUND
    if plays.next and not given.json:
        print(f"next: {plays.next}")
    return 0


def _of_job(given: argparse.Namespace, others: list[str]) -> _Plays | None:
    """Plays the environments of a job's run, with its model, its sampling and a server as its own."""
    from counterpoint.cli.arguments.command import parse
    from counterpoint.cli.eval import run_of, sections
    from counterpoint.job.config import JobConfig
    from counterpoint.job.evaluation.server import at_servers, server_of, url_of
    from counterpoint.job.evaluation.subject import subject_of

    for name in ("args", "tool_parser", "max_tokens", "temperature", "timeout"):
        if getattr(given, name) is not None:
            raise UserError(f"env check {given.kind}: --{name.replace('_', '-')} is for a KIND; the job's file says it")
    model = [] if given.model is None else [f"--model={given.model}"]
    command = parse("env check", JobConfig, [given.kind, *model, *others])
    if command is None:
        return None
    given.file, run = command.file, run_of(command.config, given.run, command.file)

    def servers(folder: Path) -> tuple[str, PoolConfig, InferenceConfig | None, dict[str, str]]:
        resolved, server, variables = sections(command.config, given, "env check")
        own = None if server is None else server_of(server, None, subject_of(resolved, None, None, []), folder)
        urls = given.server if own is None else [url_of(own)]
        return resolved.model, at_servers(resolved, urls, own).inference, own, variables

    return _Plays(
        [(each, run.sampling_of(each)) for each in run.environments],
        servers,
        min(run.schedule.group_size, MOST_ROLLOUTS),
        run.schedule.most_in_flight,
        [*run.opponents],
        f"counterpoint run {shlex.quote(given.kind)}",
    )


def _of_kind(given: argparse.Namespace, others: list[str]) -> _Plays:
    """Plays one environment, with a small model unless another is named."""
    from counterpoint.environments.config import EnvironmentConfig
    from counterpoint.environments.sampling import SamplingConfig
    from counterpoint.inference.config import InferenceConfig, PoolConfig
    from counterpoint.job.evaluation.server import LOG, free_port, url_of
    from counterpoint.job.resolve_model import resolve_model
    from counterpoint.transport.configuration.explain import validate

    if others:
        _check_parser().error(f"unrecognized arguments: {' '.join(others)}")
    timeout = {"rollout_timeout_seconds": DEADLINE_SECONDS if given.timeout is None else given.timeout}
    fields = {"name": "checked", "kind": given.kind, "args": given.args or {}, **timeout}
    sampled = {name: value for name in ("temperature", "max_tokens") if (value := getattr(given, name)) is not None}
    environment = validate(EnvironmentConfig, fields, "env check")
    sampling = validate(SamplingConfig, sampled, "env check")
    if not given.server:
        require("env check without --server", *SERVING)

    def servers(folder: Path) -> tuple[str, PoolConfig, InferenceConfig | None, dict[str, str]]:
        model = resolve_model(given.model or MODEL)
        if given.server:
            return str(model), PoolConfig(urls=given.server, startup_timeout_seconds=START_SECONDS), None, {}
        settings: dict[str, Any] = {"model": str(model), "max_model_len": _context(model), "log_file": folder / LOG}
        settings |= {"port": free_port("127.0.0.1", 0), "tool_parser": given.tool_parser}
        own = validate(InferenceConfig, settings, "env check")
        return str(model), PoolConfig(urls=[url_of(own)], startup_timeout_seconds=START_SECONDS), own, {}

    return _Plays([(environment, sampling)], servers)


def _check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint env check",
        description="Plays the environments of a job, or one alone, against a real server, and says what training would meet. "
        "Exit code 1: something would break.",
        epilog="With JOB.toml, model, arguments, sampling and server are the file's; --section.key VALUE sets keys of it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "kind", metavar="JOB.toml | KIND", help="a job's file, a built-in kind, or an import path, package.module:Class"
    )
    parser.add_argument("--run", metavar="ID", help="the run whose environments are meant, if the file has several")
    parser.add_argument("--args", type=_table, metavar="JSON", help="of a KIND: the constructor's keyword arguments")
    parser.add_argument(
        "--model", help=f"a directory, a hub name or a built-in model (default: the file's; of a KIND {MODEL})"
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help="a running `counterpoint inference` of that model (default: start one)",
    )
    parser.add_argument(
        "--tool-parser", metavar="NAME", help="of a KIND: how the server reads calls of tools, such as hermes"
    )
    parser.add_argument("--examples", type=_positive, default=4, metavar="N", help="examples to play (default: 4)")
    parser.add_argument(
        "--rollouts",
        type=_positive,
        metavar="N",
        help=f"rollouts of each (default: the file's group_size up to {MOST_ROLLOUTS}; of a KIND 4)",
    )
    parser.add_argument(
        "--rounds", type=_positive, default=3, metavar="N", help="how often all are played (default: 3)"
    )
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="of a KIND: of a completion (default: 256)")
    parser.add_argument("--temperature", type=float, help="of a KIND: of sampling (default: 1)")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help=f"of a KIND: deadline of a rollout (default: {DEADLINE_SECONDS:g})",
    )
    parser.add_argument("--full", action="store_true", help="print the worst rollout, too")
    parser.add_argument("--json", action="store_true", help="print the findings for programs")
    return parser


def _played(given: argparse.Namespace, plays: _Plays, loaded: list[Environment]) -> list[tuple[Observations, str]]:
    """Plays against the given server, or one of its own. Returns what was seen of each environment, and the model."""
    # The findings say what blocks the loop, without what the check itself does to it.
    blame = logging.getLogger("counterpoint.run.loop_health")
    before = blame.level
    blame.setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory(prefix="counterpoint-") as folder:
            model, pool, own, variables = plays.servers(Path(folder))
            try:
                seen = asyncio.run(_observe(given, plays, loaded, model, pool, own, variables, Path(folder)))
            except* ValueError as errors:
                raise UserError(str(errors.exceptions[0])) from None
            return [(each, model) for each in seen]
    finally:
        blame.setLevel(before)


async def _observe(
    given: argparse.Namespace,
    plays: _Plays,
    loaded: list[Environment],
    model: str,
    servers: PoolConfig,
    own: InferenceConfig | None,
    variables: dict[str, str],
    folder: Path,
) -> list[Observations]:
    from counterpoint.inference.base import InferenceError
    from counterpoint.inference.model_facts import read_bounds
    from counterpoint.inference.pool.pool import InferencePool
    from counterpoint.job.environments.observe import PlayPlan, observe
    from counterpoint.job.evaluation.server import LOG, server_running, unless_ended

    pool = InferencePool(servers).model(model, bounds=read_bounds(Path(model)))
    # Another's server may hold as many as its model.
    context = _longest(Path(model)) if own is None else own.max_model_len
    plan = PlayPlan(given.examples, given.rollouts or plays.rollouts, given.rounds, context, plays.at_once)
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    started: list[object] = []

    def note(server: asyncio.Task[int]) -> None:
        if not ended.done():
            ended.set_result(server.result())

    async with contextlib.AsyncExitStack() as resources:

        @contextlib.asynccontextmanager
        async def serving() -> AsyncIterator[Served]:
            """Starts the server for the first environment that is played with a model; the others find it started."""
            if not started:
                if own is not None:
                    _say(f"starting vLLM with {Path(model).name} ...")
                    server = await resources.enter_async_context(server_running(own, folder, variables))
                    server.add_done_callback(note)
                resources.push_async_callback(pool.release)
                await pool.start()
                # The parser loads for seconds, which are not the environment's.
                if own is not None and own.tool_parser is not None:
                    tool = {"type": "function", "function": {"name": "tool", "parameters": {}}}
                    await pool.parse([0], [tool], {}, cut=True, server=None)
                started.append(pool)
            yield pool

        async def all_seen() -> list[Observations]:
            return [
                await observe(
                    config, environment, sampling, Path(model), serving(), plan, folder, _say, plays.opponents
                )
                for (config, sampling), environment in zip(plays.environments, loaded, strict=True)
            ]

        try:
            return await unless_ended(all_seen(), ended, lambda: _why_ended(folder / LOG))
        except InferenceError as error:
            raise UserError(str(error)) from None


def _why_ended(log_file: Path) -> str:
    """Returns what to say of a server that has ended: its reason, else the end of its log, which is removed with the check."""
    from counterpoint.inference.root_cause import root_cause
    from counterpoint.transport.process.child import last_lines

    cause = root_cause(log_file)
    return f": {cause}" if cause is not None else "\n".join(["", *last_lines(log_file, LINES_SHOWN)])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _context(model: Path) -> int:
    """Returns the most tokens that a server of the model is asked to hold."""
    return min(_longest(model), 4096)


def _longest(model: Path) -> int:
    """Returns the most positions that the model's config.json names; 4,096 where it names none."""
    config = orjson.loads((model / "config.json").read_bytes())
    return int((config.get("text_config") or config).get("max_position_embeddings", 4096))


def _print(seen: Observations, found: list[Finding], model: Path, full: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from counterpoint.cli.display.console import console_for
    from counterpoint.cli.display.rollouts import print_rollout
    from counterpoint.environments.chat import Chat
    from counterpoint.job.reading.rollouts.rollout_records import RolloutRecord, best_record, worst_record
    from counterpoint.orchestrator.rollouts.transcripts import Transcriber
    from counterpoint.orchestrator.step.records import rollout_record
    from counterpoint.transport.printable import printable

    console, transcribe = console_for(pipe_width=200), Transcriber(Chat(model).transcribe, 4096)
    records = []
    for rollout in seen.rollouts:
        line: dict[str, Any] = loads(
            dumps(rollout_record(rollout, sorted(rollout.state), transcribe(rollout)), default=repr)
        )
        records.append(RolloutRecord(line | {"advantage": None}))
    chosen = [best_record(records), worst_record(records) if full else None]
    for record in chosen if any(chosen) else records[:1]:
        if record is not None:
            outcome = "played by the check, which trains nothing" if record.error is None else None
            print_rollout(console, f"the check of {seen.kind}", record, outcome=outcome)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("check", "", "seen"):
        table.add_column(name, overflow="fold", no_wrap=name != "seen")
    styles = {"ok": "green", "warning": "yellow", "error": "bold red"}
    for finding in found:
        table.add_row(finding.check, Text(finding.level, styles[finding.level]), Text(printable(finding.text)))
    console.print(table)


def _table(text: str) -> dict[str, Any]:
    try:
        value = loads(text, MAX_WRITTEN_DEPTH)
    except JsonError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, such as '{{\"examples\": 10}}'")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return value
