"""`counterpoint env check KIND` plays an environment alone, and says what training would meet; `env new NAME` writes one."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
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
    from counterpoint.inference.config import InferenceConfig
    from counterpoint.job.environments.findings import Finding
    from counterpoint.job.environments.observe import Observations, Plan

FOUND = 1
"""The exit code when something would break in training."""

MODEL = "tiny-dense"
START_SECONDS = 300.0
LINES_SHOWN = 15
"""The last lines of a server's log that are shown when it ends."""
DEADLINE_SECONDS = 60.0

USAGE = """usage: counterpoint env check KIND [--args JSON] [--model MODEL] [--server URL] ...
       counterpoint env new NAME [--directory DIRECTORY]

check  plays the environment KIND against a real server, and prints a transcript and what would break in training
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
    print(f"next: {prefix}counterpoint env check {given.name}:{_class(given.name)}")
    return 0


def _class(name: str) -> str:
    from counterpoint.job.environments.new_environment import class_name

    return class_name(name)


def _check(arguments: list[str]) -> int:
    given = _check_parser().parse_args(arguments)
    from counterpoint.environments.config import EnvironmentConfig
    from counterpoint.environments.sampling import SamplingConfig
    from counterpoint.environments.workers.load import load_environment
    from counterpoint.job.environments.examples import fault_of_examples
    from counterpoint.job.environments.findings import Level, findings
    from counterpoint.job.environments.observe import Plan
    from counterpoint.job.resolve_model import resolve_model
    from counterpoint.transport.configuration.explain import validate

    logging.basicConfig(level=logging.WARNING, format="%(levelname)-7s %(message)s", stream=sys.stderr)
    fields = {"name": "checked", "kind": given.kind, "args": given.args, "rollout_timeout_seconds": given.timeout}
    environment = validate(EnvironmentConfig, fields, "env check")
    sampled = {"temperature": given.temperature, "max_tokens": given.max_tokens}
    sampling = validate(SamplingConfig, sampled, "env check")
    plan = Plan(given.examples, given.rollouts, given.rounds)
    if given.server is None:
        require("env check without --server", *SERVING)
    try:  # before a model is built and a server starts: its errors are there at once
        loaded = load_environment(environment)
    except ValueError as error:
        raise UserError(str(error)) from None
    if (fault := fault_of_examples(loaded)) is not None:
        raise UserError(f"environment {given.kind!r}: {fault}")
    model = resolve_model(given.model)
    seen = _played(given, environment, loaded, sampling, model, plan)
    found = findings(seen)
    if given.json:
        print(orjson.dumps([{"check": f.check, "level": f.level, "text": f.text} for f in found]).decode())
    else:
        _print(seen, found, model, given.full)
    return FOUND if any(finding.level is Level.ERROR for finding in found) else 0


def _check_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint env check",
        description="Plays an environment alone against a real server, and says what training would meet. "
        "Exit code 1: something would break.",
        allow_abbrev=False,
    )
    parser.add_argument("kind", metavar="KIND", help="a built-in kind, or an import path, package.module:Class")
    parser.add_argument("--args", type=_table, default={}, metavar="JSON", help="the constructor's keyword arguments")
    parser.add_argument(
        "--model", default=MODEL, help=f"a directory, a hub name or a built-in model (default: {MODEL})"
    )
    parser.add_argument(
        "--server", metavar="URL", help="a running `counterpoint inference` of that model (default: start one)"
    )
    parser.add_argument("--tool-parser", metavar="NAME", help="how the server reads calls of tools, such as hermes")
    parser.add_argument("--examples", type=_positive, default=4, metavar="N", help="examples to play (default: 4)")
    parser.add_argument("--rollouts", type=_positive, default=4, metavar="N", help="rollouts of each (default: 4)")
    parser.add_argument(
        "--rounds", type=_positive, default=3, metavar="N", help="how often all are played (default: 3)"
    )
    parser.add_argument("--max-tokens", type=_positive, default=256, metavar="N", help="of a completion (default: 256)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling (default: 1)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEADLINE_SECONDS,
        metavar="SECONDS",
        help=f"deadline of a rollout (default: {DEADLINE_SECONDS:g})",
    )
    parser.add_argument("--full", action="store_true", help="print the worst rollout, too")
    parser.add_argument("--json", action="store_true", help="print the findings for programs")
    return parser


def _played(
    given: argparse.Namespace,
    config: EnvironmentConfig,
    environment: Environment,
    sampling: SamplingConfig,
    model: Path,
    plan: Plan,
) -> Observations:
    """Plays against the given server, or one of its own."""
    import contextlib

    from counterpoint.inference.config import InferenceConfig
    from counterpoint.job.evaluation.server import LOG, free_port, url_of
    from counterpoint.transport.configuration.explain import validate

    with contextlib.ExitStack() as resources:
        # The findings say what blocks the loop, without what the check itself does to it.
        blame = logging.getLogger("counterpoint.orchestrator.loop_health")
        resources.callback(blame.setLevel, blame.level)
        blame.setLevel(logging.ERROR)
        folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-")))
        own: InferenceConfig | None = None
        url = given.server
        if url is None:
            settings: dict[str, Any] = {"model": str(model), "max_model_len": _context(model), "log_file": folder / LOG}
            settings |= {"port": free_port("127.0.0.1", 0), "tool_parser": given.tool_parser}
            own = validate(InferenceConfig, settings, "env check")
            url = url_of(own)
            print(f"starting vLLM with {model.name} ...", file=sys.stderr)
        try:
            return asyncio.run(_observe(url, own, str(model), config, environment, sampling, plan, folder))
        except* ValueError as errors:
            raise UserError(str(errors.exceptions[0])) from None


async def _observe(
    url: str,
    own: InferenceConfig | None,
    model: str,
    config: EnvironmentConfig,
    environment: Environment,
    sampling: SamplingConfig,
    plan: Plan,
    folder: Path,
) -> Observations:
    from counterpoint.cluster.process import last_lines
    from counterpoint.inference.base import InferenceError
    from counterpoint.inference.config import PoolConfig
    from counterpoint.inference.model_facts import read_bounds
    from counterpoint.inference.pool.pool import InferencePool
    from counterpoint.job.environments.observe import observe
    from counterpoint.job.evaluation.server import LOG, server_running, unless_ended

    servers = PoolConfig(urls=[url], startup_timeout_seconds=START_SECONDS)
    pool = InferencePool(servers).model(model, bounds=read_bounds(Path(model)))

    async def played() -> Observations:
        try:
            await pool.start()
            if own is not None and own.tool_parser is not None:  # it loads for seconds, which are not the environment's
                tool = {"type": "function", "function": {"name": "tool", "parameters": {}}}
                await pool.parse([0], [tool], {}, cut=True, server=None)
            return await observe(config, environment, sampling, Path(model), pool, plan, folder, _say)
        finally:
            await pool.release()

    try:
        if own is None:
            return await played()
        async with server_running(own, folder, {}) as ended:
            return await unless_ended(played(), ended, lambda: "\n".join(["", *last_lines(folder / LOG, LINES_SHOWN)]))
    except InferenceError as error:
        raise UserError(str(error)) from None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _context(model: Path) -> int:
    """Returns the most tokens that a server of the model is asked to hold."""
    config = orjson.loads((model / "config.json").read_bytes())
    return min(int(config.get("max_position_embeddings", 4096)), 4096)


def _print(seen: Observations, found: list[Finding], model: Path, full: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from counterpoint.cli.display.console import console_for
    from counterpoint.cli.display.rollouts import print_rollout
    from counterpoint.environments.chat import Chat
    from counterpoint.job.inspection.rollout_records import RolloutRecord, best_record, worst_record
    from counterpoint.orchestrator.rollouts.transcripts import Transcriber
    from counterpoint.orchestrator.step.records import rollout_record
    from counterpoint.transport.printable import printable

    console, transcribe = console_for(pipe_width=200), Transcriber(Chat(model).transcribe, 4096)
    records = []
    for rollout in seen.rollouts:
        line: dict[str, Any] = loads(
            dumps(rollout_record(rollout, sorted(rollout.state), transcribe(rollout)), default=repr)
        )
        records.append(RolloutRecord(line | {"advantage": None, "filtered_by": "the check, which trains nothing"}))
    chosen = [best_record(records), worst_record(records) if full else None]
    for record in chosen if any(chosen) else records[:1]:
        if record is not None:
            print_rollout(console, f"the check of {seen.kind}", record)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in ("check", "", "seen"):
        table.add_column(name, overflow="fold")
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
