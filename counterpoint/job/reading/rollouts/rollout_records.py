"""The records of a step's rollouts: finding their file, reading them, and picking one.

A model, an environment or a guest wrote them, so every field is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.job.directory import run_ids_in
from counterpoint.job.reading.fine_tuning import fine_tuning_of
from counterpoint.orchestrator.step.differences import EXAMPLES, EXAMPLES_FILE
from counterpoint.orchestrator.step.discarded import DROPPED_FILE
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular, parse_json

MAX_RECORD_BYTES = 64 * 2**20
"""Most bytes of one rollout's line."""

Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One rollout's record. A field that is missing or has the wrong type is None or empty."""

    fields: dict[str, Any]
    """The record as read."""

    def _field(self, name: str, kind: type[Kind]) -> Kind | None:
        value = self.fields.get(name)
        return value if isinstance(value, kind) else None

    @property
    def rollout_id(self) -> str:
        """The rollout's id; `?` if unknown."""
        return self._field("rollout_id", str) or "?"

    @property
    def environment(self) -> str:
        """The environment's name; `?` if unknown."""
        return self._field("environment", str) or "?"

    @property
    def example(self) -> str:
        """The example's index in its environment."""
        return str(self._field("example_index", int))

    @property
    def answer(self) -> str | None:
        """The right answer of the example; None if it has none, or an older version wrote the record."""
        return self._field("answer", str)

    @property
    def reward(self) -> float | None:
        """The reward, if it is a finite number."""
        return finite_number(self.fields.get("reward"))

    @property
    def advantage(self) -> float | None:
        """The advantage, if it is a finite number."""
        return finite_number(self.fields.get("advantage"))

    @property
    def error(self) -> str | None:
        """Why the rollout failed; None if it did not."""
        return self._field("error", str)

    @property
    def filtered_by(self) -> str | None:
        """The filter that dropped the rollout; None if none did."""
        return self._field("filtered_by", str)

    @property
    def dropped(self) -> str | None:
        """Why its whole group was dropped after it was finalized; None if it was not, or an older version wrote the record."""
        return self._field("dropped", str)

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The turns, in order."""
        return [turn for turn in self._field("turns", list) or [] if isinstance(turn, dict)]

    @property
    def opponent_turns(self) -> list[dict[str, Any]]:
        """The calls of other policies, in order."""
        return [turn for turn in self._field("opponent_turns", list) or [] if isinstance(turn, dict)]

    @property
    def players(self) -> list[str]:
        """The names of its players, in the order of their turns; empty if it has one alone."""
        names = [turn.get("player") for turn in self.turns]
        return list(dict.fromkeys(name for name in names if isinstance(name, str) and name))

    @property
    def completion_tokens(self) -> int:
        """The completion tokens of all turns."""
        return sum(int(finite_number(turn.get("completion_tokens")) or 0) for turn in self.turns)

    @property
    def outcome(self) -> str:
        """Whether the rollout was trained, filtered, dropped with its group or failed, in words."""
        if self.error is not None:
            return f"failed: {self.error}"
        if self.filtered_by is not None:
            return f"filtered by {self.filtered_by}"
        return f"not trained: its group was dropped ({self.dropped})" if self.dropped is not None else "trained"


def finite_number(value: object) -> float | None:
    """Returns the value if it is a finite number, else None."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def whole_number(value: object) -> int | None:
    """Returns the whole part of a number that JSON holds exactly; None for anything else."""
    number = finite_number(value)
    return None if number is None or abs(number) > 2**53 else int(number)


def find_run(job: Path, run_id: str | None) -> str:
    """Returns `run_id`, or the id of the job's only run. Raises `UserError` if there is no such run, or no single one."""
    known = run_ids_in(job)
    if not known and (first := fine_tuning_of(job)) is not None:
        raise UserError(f"{job} has no rollouts yet: {first}")
    if not known:
        if not job.exists():
            raise UserError(f"{job} does not exist; expected the directory of a job")
        raise UserError(f"{job} holds no run; expected the directory of a job whose runs have begun")
    if run_id is None and len(known) > 1:
        raise UserError(f"{job} holds {len(known)} runs; name one with --run: {', '.join(known)}")
    if run_id is not None and run_id not in known:
        raise UserError(f"there is no run {run_id!r} in {job}: its runs are {', '.join(known)}")
    return run_id or known[0]


def find_step(job: Path, run_id: str, step: int | None) -> int:
    """Returns `step`, or the newest shipped step. Raises `UserError` if the run has not shipped it."""
    steps = published_steps(job / f"run_{run_id}" / "rollouts")
    if not steps:
        if (job / f"run_{run_id}" / "sft.json").exists():
            raise UserError(
                f"run {run_id} in {job} is supervised fine-tuning (`counterpoint sft`), which has no rollouts"
            )
        raise UserError(f"run {run_id} in {job} has shipped no step yet")
    if step is not None and step not in steps:
        raise UserError(f"run {run_id} in {job} has no rollouts of step {step}; it has steps {steps[0]} to {steps[-1]}")
    return steps[-1] if step is None else step


UNSTEPPED = 0
"""This number stands for no step: it selects rollouts that were dropped and that no step has recorded yet."""


def records_file(job: Path, run_id: str, step: int) -> Path:
    """Returns the path of a step's records, or of `UNSTEPPED`."""
    if step == UNSTEPPED:
        paths = [job / f"run_{run_id}" / name for name in (EXAMPLES_FILE, DROPPED_FILE)]
        return next((path for path in paths if path.exists()), paths[-1])
    return job / f"run_{run_id}" / "rollouts" / f"step_{step}" / "rollouts.jsonl"


def read_records(job: Path, run_id: str, step: int) -> Iterator[RolloutRecord]:
    """Reads the records of a step, one at a time. Raises `UserError` for a missing or damaged file."""
    yield from records_in(records_file(job, run_id, step))


def records_without_difference(job: Path, run_id: str) -> tuple[str, list[RolloutRecord]]:
    """Returns the worst rollouts of groups that show no difference to learn from, and in words which groups those are.

    They are the newest groups if the run says so of them, else those of its newest step. Raises `UserError` for a damaged file,
    and if there are none.
    """
    if (job / f"run_{run_id}" / EXAMPLES_FILE).exists():
        return "a group without a difference", list(records_in(job / f"run_{run_id}" / EXAMPLES_FILE))
    step = find_step(job, run_id, None)
    groups: dict[str, tuple[RolloutRecord, set[float]]] = {}
    for record in read_records(job, run_id, step):
        if record.reward is not None and record.error is None:
            _, rewards = groups.setdefault(str(record.fields.get("group_id")), (record, set()))
            rewards.add(record.reward)
    alike = [first for first, rewards in groups.values() if len(rewards) == 1]
    if not alike:
        raise UserError(
            f"the rewards differ within each of the {len(groups)} groups of step {step}, the newest of run {run_id} in {job}"
        )
    where = f"step {step}, of whose {len(groups)} groups {len(alike)} have equal rewards"
    return where, sorted(alike, key=lambda record: record.reward or 0.0)[:EXAMPLES]


def dropped_records(job: Path, run_id: str) -> list[RolloutRecord]:
    """Returns some of the newest rollouts that no step has recorded yet, because their groups were dropped; the worst first.

    Raises `UserError` for a damaged file.
    """
    file = records_file(job, run_id, UNSTEPPED)
    return list(islice(records_in(file), EXAMPLES)) if file.exists() else []


def records_in(path: Path) -> Iterator[RolloutRecord]:
    """Reads the records of a file, one at a time. Raises `UserError` for a missing or damaged file."""
    try:
        with open_regular(path) as file:
            number = 0
            while line := file.readline(MAX_RECORD_BYTES + 1):
                number += 1
                if len(line) > MAX_RECORD_BYTES:
                    raise UserError(f"{path}:{number}: a record of more than {MAX_RECORD_BYTES} bytes")
                try:
                    yield RolloutRecord(parse_json(line))
                except UntrustedFileError as error:
                    raise UserError(f"{path}:{number}: {error}") from None
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except (UntrustedFileError, OSError) as error:
        raise UserError(str(error)) from None


def record_of(records: Iterable[RolloutRecord], rollout_id: str) -> RolloutRecord | None:
    """Returns the first record with this id; None if there is none."""
    return next((record for record in records if record.rollout_id == rollout_id), None)


def best_record(records: Iterable[RolloutRecord]) -> RolloutRecord | None:
    """Returns the record with the highest reward; None if no rollout has one."""
    return _extreme(records, max)


def worst_record(records: Iterable[RolloutRecord]) -> RolloutRecord | None:
    """Returns the record with the lowest reward, or one that failed if no rollout has a reward; None if there is none."""
    failed: list[RolloutRecord] = []

    def noted() -> Iterator[RolloutRecord]:
        for record in records:
            if record.error is not None and not failed:
                failed.append(record)
            yield record

    return _extreme(noted(), min) or next(iter(failed), None)


def _extreme(records: Iterable[RolloutRecord], choose: Callable[..., RolloutRecord | None]) -> RolloutRecord | None:
    rewarded = (record for record in records if record.reward is not None and record.error is None)
    return choose(rewarded, key=lambda record: record.reward, default=None)
