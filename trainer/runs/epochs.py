"""Which process of a run's orchestrator is the newest: no older one is heard, so that two never mix their histories.

The newest epoch and its holder (`orchestrator/take_over.py`) are in `trainer/<run_id>/epoch.json`, since a restart must not
forget them. They are written when the first message of a session comes: a process that was killed before has sent nothing, and
perhaps not kept its epoch either, so the next one of its directory may have the same.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from trainer.runs.manager import MultiRunManager
from transport.files.atomic import write_atomically
from transport.files.untrusted import read_json
from transport.messages import Hello
from transport.printable import printable

FORMAT = 1

_MAX_BYTES = 2**14

_MAX_HOLDER = 1000
"""Characters. A longer one, written, could not be read again."""


class Epochs:
    """The newest epochs of the runs of a job; all that is kept is on the disk."""

    def __init__(self, output_dir: Path, manager: MultiRunManager) -> None:
        """`manager` has the runs."""
        self._output_dir = output_dir
        self._manager = manager

    def refusal(self, hello: Hello) -> str | None:
        """Returns why the process must not take the place of the run's orchestrator; None if it may."""
        record = self._manager.registry.find(hello.run_id)
        known = record.directory if record is not None else None
        if known is not None and self._manager.is_gone(hello.run_id, known):
            return None  # another run of that name
        run = self._manager.registry.taking(hello.run_id)
        if run is not None and run.progress.step < hello.durable:
            return (
                f"this trainer is at step {run.progress.step} of run {hello.run_id!r}, and a trainer has reported step "
                f"{hello.durable} durable to this process: it is not the same run"
            )
        try:
            found = self._read(hello.run_id)
        except (ValueError, OSError) as error:
            return f"{self._path(hello.run_id)} cannot be read: {error}. Restore it, or remove it if one orchestrator is left"
        if len(hello.holder) > _MAX_HOLDER:
            return f"its HELLO names a holder of {len(hello.holder)} characters; expected at most {_MAX_HOLDER}"
        if found is None or hello.epoch > found[0] or (hello.epoch, hello.holder) == found:
            return None
        return (
            f"run {hello.run_id!r} was taken over by {printable(found[1])} (epoch {found[0]}), and this process has epoch "
            f"{hello.epoch}. That one continues the run; what this one has generated since is not trained. Do not start it again"
        )

    def confirm(self, hello: Hello) -> None:
        """Notes that the process has sent something in its epoch: from now on no older one is heard. Raises `OSError`."""
        with suppress(ValueError):
            if self._read(hello.run_id) == (hello.epoch, hello.holder):
                return
        path, found = self._path(hello.run_id), {"format": FORMAT, "epoch": hello.epoch, "holder": hello.holder}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found).encode() + b"\n")

    def _read(self, run_id: str) -> tuple[int, str] | None:
        """Returns the newest epoch and its holder; None if there is none. Raises `ValueError` for a damaged file, `OSError`."""
        try:
            match read_json(self._path(run_id), _MAX_BYTES):
                case {"format": 1, "epoch": int(epoch), "holder": str(holder)}:
                    return epoch, holder
                case found:
                    raise ValueError(f"{found!r:.80}; expected format {FORMAT}, epoch and holder")
        except FileNotFoundError:
            return None

    def _path(self, run_id: str) -> Path:
        return self._output_dir / "trainer" / run_id / "epoch.json"
