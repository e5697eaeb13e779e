"""What a trial keeps in `tries/<name>/` of its job: what was asked, each measurement as it came, and the verdict. All durable.

asked.json        `TrialAsked`, before anything is begun
measured.jsonl    a line for each evaluation of a branch
verdict.json      `TrialVerdict`, once the branches have ended
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import orjson
from pydantic import Field, TypeAdapter, ValidationError

from counterpoint.job.trial.decisions import SIDES, ExampleKey, HeldOut, Side, TrialVerdict
from counterpoint.run.branches import origin_of
from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.json_lines import append_line, read_lines
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

TRIES = "tries"
"""The folder of a job's trials."""

FORMAT = 1

_MAX_BYTES = 2**20

_MEASURED = TypeAdapter(HeldOut)

T = TypeVar("T")


class TrialAsked(Config, frozen=True):
    """What is to be tried."""

    format: int = FORMAT
    run: Identifier
    """The run of which a step is branched."""
    step: int = Field(ge=1)
    """The last step that the branches have in common with it."""
    changes: dict[str, str]
    """New values by dotted key, as they were written. Empty: the branches are alike."""
    tokens: int = Field(ge=1)
    """The budget of both branches, trained and evaluated, prompts included. Each has a half."""
    evaluation: Identifier
    """The run's evaluation by which the branches are compared."""
    interval: int = Field(ge=1)
    """Steps between two evaluations of a branch."""


class TrialRecord:
    """The files of one trial."""

    def __init__(self, job: Path, name: str) -> None:
        """Reads nothing yet."""
        self.name, self._job = name, job
        self.directory = job / TRIES / name

    def branch(self, side: Side) -> str:
        """Returns the id of a branch's run."""
        return f"{self.name}-{side}"

    def run_dir(self, side: Side) -> Path:
        """Returns the directory of a branch's run."""
        return self._job / f"run_{self.branch(side)}"

    @property
    def asked(self) -> TrialAsked | None:
        """What was asked; None if there is no such trial. Raises `UserError` for a damaged file."""
        return self._read("asked.json", TypeAdapter(TrialAsked))

    @property
    def verdict(self) -> TrialVerdict | None:
        """The verdict; None before there is one. Raises `UserError` for a damaged file."""
        return self._read("verdict.json", TypeAdapter(TrialVerdict))

    def _read(self, name: str, kind: TypeAdapter[T]) -> T | None:
        path = self.directory / name
        try:
            return kind.validate_python(read_json(path, _MAX_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, UntrustedFileError, ValidationError) as error:
            raise UserError(f"{path} cannot be used: {error}") from None

    @property
    def is_begun(self) -> bool:
        """Whether it is bound to the step that was asked: it has a branch, a measurement, or its verdict.

        Raises `UserError` for a damaged file.
        """
        files = (self.directory / "measured.jsonl", self.directory / "verdict.json")
        return any(path.exists() for path in files) or any(origin_of(self.run_dir(side)) for side in SIDES)

    def begin(self, asked: TrialAsked) -> None:
        """Records what is asked. Raises `OSError`."""
        write_atomically(self.directory / "asked.json", orjson.dumps(asked.model_dump()))

    def add(self, measured: HeldOut) -> None:
        """Records a measurement. Raises `OSError`."""
        rewards = [[*key, reward] for key, reward in measured.rewards.items()]
        line = {name: getattr(measured, name) for name in ("side", "step", "spent", "bounds")} | {"rewards": rewards}
        append_line(self.directory / "measured.jsonl", line, durable=True)

    def measurements(self) -> Iterator[HeldOut]:
        """Yields the measurements in their order. Raises `UserError` for a damaged file."""
        path = self.directory / "measured.jsonl"
        try:
            for _, line in read_lines(path):
                rewards: dict[ExampleKey, float | None] = {
                    (name, index): value for name, index, value in line["rewards"]
                }
                yield _MEASURED.validate_python({**line, "rewards": rewards})
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} cannot be used: {error!r}") from None

    def conclude(self, verdict: TrialVerdict) -> None:
        """Records the verdict. Raises `OSError`."""
        write_atomically(self.directory / "verdict.json", orjson.dumps(asdict(verdict)))
