"""Rehearses a job's own environments before a server starts: in a child process, with made-up answers in the model's place.

So it does with rows that a function of one's own scores. What reaches beyond the machine's memory is left out of them: judges,
programs that are run, MCP servers.

The parent, `counterpoint run` and its `--dry-run`, refuses the job if every rollout fails for a reason that no model can change,
such as a `score` that returns None. Whatever else is odd is one line, since a made-up answer proves less than a model's: the
rewards do not tell a right answer from wrong ones, or an environment takes long to start. `counterpoint env check` says more.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import orjson

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.job.check import in_child
from counterpoint.job.config import JobConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.printable import printable
from counterpoint.transport.process.exit_codes import describe_exit

CHILD = "counterpoint.job.environments.rehearsing"
"""The program of the child. It imports what plays and scores; this module does not, since every job's start imports it."""

_WITH_ROWS = ("single-turn", "tools")
"""The built-in kinds with a rubric."""

_LEFT_OUT = frozenset({"judge", "code", "mcp"})
"""Kinds of a rubric's parts and of tools that are not played."""


def rehearse_runs(config: JobConfig, model: Path) -> None:
    """Rehearses the environments in which code of one's own decides; prints what is odd on standard error.

    `model` is the model's directory. Raises `UserError` for an environment of which nothing can succeed.
    """
    runs = [run for run in config.every_run if any(played_of(each) for each, _ in run.every_environment.values())]
    if not runs:
        return
    given = b"\n".join(run.model_copy(update={"model": str(model)}).model_dump_json().encode() for run in runs)
    code, said = in_child(["-m", CHILD, str(config.inference.max_model_len)], given, {})
    if code != 0:  # a process that is killed, or that waits without end, shows nothing
        how = "did not end in time" if code is None else describe_exit(code)
        return say(f"environments were not rehearsed: the process that plays them {how}")
    found = orjson.loads(said)
    for text in found["odd"]:
        say(f"warning: {text}")
    if found["hopeless"]:
        raise UserError(found["hopeless"][0])


def played_of(config: EnvironmentConfig) -> EnvironmentConfig | None:
    """Returns the environment as it is played before a start; None where no code of one's own decides."""
    if ":" in config.kind:
        return config
    rubric, tools = config.args.get("rubric", []), config.args.get("tools", [])
    if config.kind not in _WITH_ROWS or not any(part["kind"] == "function" for part in rubric):
        return None
    kept: dict[str, Any] = {"rubric": [part for part in rubric if part["kind"] not in _LEFT_OUT]}
    if tools:
        kept["tools"] = [tool for tool in tools if isinstance(tool, str) or tool["kind"] not in _LEFT_OUT]
    return config.model_copy(update={"args": config.args | kept})


def say(text: str) -> None:
    """Prints a line on standard error."""
    sys.stderr.write(f"{printable(text)}\n")
