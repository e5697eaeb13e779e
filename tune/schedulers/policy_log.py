"""The log of population based training: which configuration each trial had when, through all that it took over.

The scheduler keeps it in its state; a callback writes it as text, so that deciding does no I/O. The files are as Ray's:
`pbt_policy_ID.txt` for each trial and `pbt_global.txt`, with a JSON list a line: the tags of the trial and of its source, the
iterations of both, the source's configuration, and the new one. They follow from the state, so that a resume restores them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counterpoint.transport.files.atomic import write_atomically
from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.trial import Trial

Row = list[Any]


class Policy:
    """All rows in their order, and for each trial those that led to its present configuration."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._rows_of: dict[str, list[int]] = {}
        self._changed: set[str] = set()

    def add(self, trial_id: str, source_id: str, row: Row) -> None:
        """Notes that a trial took over a source: its history is the source's from now on, and then this row."""
        self._rows_of[trial_id] = [*self._rows_of.get(source_id, ()), len(self.rows)]
        self.rows.append(row)
        self._changed.add(trial_id)

    def rows_of(self, trial_id: str) -> list[Row]:
        """The rows of one trial, oldest first."""
        return [self.rows[index] for index in self._rows_of.get(trial_id, ())]

    def take_changed(self) -> set[str]:
        """The trials whose rows have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def state(self) -> dict[str, Any]:
        """All rows, as JSON values."""
        return {"rows": list(self.rows), "rows_of": {name: list(indices) for name, indices in self._rows_of.items()}}

    def restore_state(self, state: dict[str, Any]) -> None:
        """Takes back what `state` returned; all files are written once more, since the last may be missing."""
        self.rows = list(state["rows"])
        self._rows_of = {name: list(indices) for name, indices in state["rows_of"].items()}
        self._changed = set(self._rows_of)


class PolicyLog(Callback):
    """Writes the policy's files into the experiment's directory at the end of each step in which it has changed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def on_step_end(self, iteration: int, trials: Sequence[Trial], **info: Any) -> None:
        """Writes what has changed."""
        self._write(trials)

    def on_experiment_end(self, trials: Sequence[Trial], **info: Any) -> None:
        """Writes what has changed."""
        self._write(trials)

    def _write(self, trials: Sequence[Trial]) -> None:
        changed = self._policy.take_changed()
        directory = ""
        for trial in trials if changed else ():
            if trial.trial_id in changed:
                directory = trial.local_dir
                _write_rows(Path(directory) / f"pbt_policy_{trial.trial_id}.txt", self._policy.rows_of(trial.trial_id))
        if directory:
            _write_rows(Path(directory) / "pbt_global.txt", self._policy.rows)


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    write_atomically(path, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
