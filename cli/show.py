"""`counterpoint show JOB`: prompts, completions and rewards of a step's rollouts, from their records.

All of it comes from a model, an environment or a guest. So control characters are escaped, markup is not interpreted, and the
text is indented so that it cannot look like a line of ours.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from job.directory import run_ids_in
from job.errors import UserError
from transport.files.atomic import published_steps
from transport.files.untrusted import UntrustedFileError, open_regular, parse_json
from transport.printable import printable

MAX_RECORD_BYTES = 64 * 2**20
"""Of one rollout's line."""

INDENT = 4

LONGEST_CELL = 160
"""Most characters in a cell of the table; a rollout printed in full is not cut."""

Kind = TypeVar("Kind")


def main(arguments: list[str]) -> int:
    """The command. Raises `UserError` where there is nothing to show."""
    given = _parser().parse_args(arguments)
    run_id = _run_of(given.job, given.run)
    step = _step_of(given.job, run_id, given.step)
    records = _records(given.job / f"run_{run_id}" / "rollouts" / f"step_{step}" / "rollouts.jsonl")
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)  # a pipe has no width; this one keeps each row on one line
    where = f"run {run_id}, step {step}"
    if given.rollout is not None:
        chosen = next((each for each in records if each.rollout_id == given.rollout), None)
        if chosen is None:
            raise UserError(f"{where} has no rollout {given.rollout!r}; without --rollout all are listed")
    elif given.best or given.worst:
        chosen = _extreme(records, max if given.best else min)
        if chosen is None:
            raise UserError(f"no rollout of {where} has a reward; without --best or --worst all are listed")
    else:
        console.print(_table(where, list(records)))
        return 0
    _print_rollout(console, where, chosen)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint show",
        description="Prints the prompts, completions and rewards of a step's rollouts: a line for each, or one in full.",
        allow_abbrev=False,
    )
    parser.add_argument("job", type=Path, metavar="JOB", help="the job's output directory")
    parser.add_argument("--step", type=int, metavar="N", help="the step (default: the newest)")
    parser.add_argument("--run", help="the run, if the job has several")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--best", action="store_true", help="print the rollout with the highest reward in full")
    which.add_argument("--worst", action="store_true", help="print the rollout with the lowest reward in full")
    which.add_argument("--rollout", metavar="ID", help="print this rollout in full")
    return parser


def _run_of(job: Path, run_id: str | None) -> str:
    known = run_ids_in(job)
    if not known:
        raise UserError(f"{job} holds no run; expected a job's output directory")
    if run_id is None and len(known) > 1:
        raise UserError(f"{job} holds {len(known)} runs; name one with --run: {', '.join(known)}")
    if run_id is not None and run_id not in known:
        raise UserError(f"there is no run {run_id!r} in {job}: its runs are {', '.join(known)}")
    return run_id or known[0]


def _step_of(job: Path, run_id: str, step: int | None) -> int:
    steps = published_steps(job / f"run_{run_id}" / "rollouts")
    if not steps:
        raise UserError(f"run {run_id} in {job} has shipped no step yet")
    if step is not None and step not in steps:
        raise UserError(f"run {run_id} in {job} has no rollouts of step {step}; it has steps {steps[0]} to {steps[-1]}")
    return steps[-1] if step is None else step


# --- reading ---


@dataclass(frozen=True, slots=True)
class _Record:
    """One rollout's record. A field that is missing or has the wrong type is None or empty."""

    fields: dict[str, Any]

    def _field(self, name: str, kind: type[Kind]) -> Kind | None:
        value = self.fields.get(name)
        return value if isinstance(value, kind) else None

    @property
    def rollout_id(self) -> str:
        return self._field("rollout_id", str) or "?"

    @property
    def environment(self) -> str:
        return self._field("environment", str) or "?"

    @property
    def example(self) -> str:
        return str(self._field("example_index", int))

    @property
    def reward(self) -> float | None:
        return _number(self.fields.get("reward"))

    @property
    def advantage(self) -> float | None:
        return _number(self.fields.get("advantage"))

    @property
    def error(self) -> str | None:
        return self._field("error", str)

    @property
    def filtered_by(self) -> str | None:
        return self._field("filtered_by", str)

    @property
    def turns(self) -> list[dict[str, Any]]:
        return [turn for turn in self._field("turns", list) or [] if isinstance(turn, dict)]

    @property
    def outcome(self) -> str:
        if self.error is not None:
            return f"failed: {self.error}"
        return f"filtered by {self.filtered_by}" if self.filtered_by is not None else "trained"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < math.inf else None


def _records(path: Path) -> Iterator[_Record]:
    """The records of a step, one at a time. Raises `UserError`."""
    try:
        with open_regular(path) as file:
            number = 0
            while line := file.readline(MAX_RECORD_BYTES + 1):
                number += 1
                if len(line) > MAX_RECORD_BYTES:
                    raise UserError(f"{path}:{number}: a record of more than {MAX_RECORD_BYTES} bytes")
                try:
                    yield _Record(parse_json(line))
                except UntrustedFileError as error:
                    raise UserError(f"{path}:{number}: {error}") from None
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except UntrustedFileError as error:
        raise UserError(str(error)) from None


def _extreme(records: Iterator[_Record], choose: Callable[..., _Record | None]) -> _Record | None:
    rewarded = (record for record in records if record.reward is not None and record.error is None)
    return choose(rewarded, key=lambda record: record.reward, default=None)


# --- showing ---


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _as_json(value: object) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:
        return "(nested too deeply to show)"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.4g}"


def _table(where: str, records: Sequence[_Record]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
        title=f"{where}: {len(records)} rollouts",
        title_justify="left",
    )
    for name in ("rollout", "environment", "example"):
        table.add_column(name, no_wrap=True)
    for name in ("reward", "advantage", "turns", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("outcome", overflow="fold")
    ordered = sorted(records, key=lambda record: (record.reward is None, -(record.reward or 0.0)))
    for record in ordered:
        tokens = sum(int(_number(turn.get("completion_tokens")) or 0) for turn in record.turns)
        reward = "" if record.reward is None else f"{record.reward:.4g}"
        cells = [record.rollout_id, record.environment, record.example, reward, _signed(record.advantage)]
        cells += [str(len(record.turns)), str(tokens), record.outcome]
        table.add_row(*(Text(_one_line(cell[:LONGEST_CELL])) for cell in cells))
    return table


def _print_rollout(console: Console, where: str, record: _Record) -> None:
    def heading(text: str, style: str = "bold") -> None:
        console.print(Text(_one_line(text), style), soft_wrap=True)

    heading(f"rollout {record.rollout_id} of {where}: example {record.example} of {record.environment}")
    reward = "none" if record.reward is None else f"{record.reward:.6g}"
    advantage = _signed(record.advantage) or "none"
    heading(f"reward {reward}, advantage {advantage}, {record.outcome}", "" if record.error is None else "red")
    for name in ("metrics", "state"):
        if left := record.fields.get(name):
            heading(f"{name} {_as_json(left)}", "")
    turns = record.turns
    for number, turn in enumerate(turns, start=1):
        place = f"turn {number} of {len(turns)}"
        _print_text(console, f"{place}, prompt: {turn.get('prompt_tokens')} tokens", turn.get("prompt"), "cyan")
        name = "answer" if number == len(turns) else "completion"
        how = (
            f"{turn.get('completion_tokens')} tokens, {turn.get('finish_reason')}, policy {turn.get('policy_version')}"
        )
        _print_text(console, f"{place}, {name}: {how}", turn.get("completion"), "green")


def _print_text(console: Console, title: str, text: object, style: str) -> None:
    console.print(Text(_one_line(title), f"bold {style}"), soft_wrap=True)
    if not isinstance(text, str):
        shown = Text("no text was recorded (recorded_tokens = 0, or an older version wrote the record)", "dim")
    else:
        shown = Text(printable(text).expandtabs())
    if console.is_terminal:
        console.print(Padding(shown, (0, 0, 0, INDENT), expand=False))
    else:  # the lines as they are, however long
        for line in shown.plain.split("\n"):
            console.print(Text(" " * INDENT + line), soft_wrap=True)
