"""Which process of a run's orchestrator is the newest: no older one is heard, so that two never mix their histories.

The newest epoch and its holder (`orchestrator/take_over.py`) are in `trainer/<run_id>/epoch.json`, since a restart must not
forget them. They are written when the first message of a session comes: a process that was killed before has sent nothing, and
perhaps not kept its epoch either, so the next one of its directory may have the same.

With them is the run's random number. Where the run's directory has another one, and no committed step, it was made anew while no
trainer ran: the former run is set aside, as one whose directory was deleted.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from counterpoint.trainer.runs import checkpoint
from counterpoint.trainer.runs.control_files import run_directory
from counterpoint.trainer.runs.manager import MultiRunManager
from counterpoint.transport.files.atomic import published_steps, write_atomically
from counterpoint.transport.files.untrusted import read_json
from counterpoint.transport.messages import Hello
from counterpoint.transport.printable import printable

logger = logging.getLogger(__name__)

FORMAT = 1

_MAX_BYTES = 2**14

_MAX_HOLDER = 1000
"""Characters. A longer one, written, could not be read again."""


_MOST_TAKEOVERS = 2**20
"""The most take-overs between two messages of a run. A peer's much larger epoch would lock the run's processes out for ever."""


@dataclass(frozen=True, slots=True)
class _Noted:
    """What an `epoch.json` says."""

    epoch: int
    holder: str
    run: str
    """The run's random number; empty where an earlier version wrote the file."""


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
            found = _read(self._path(hello.run_id))
        except (ValueError, OSError) as error:
            return f"{self._path(hello.run_id)} cannot be read: {error}. Restore it, or remove it if one orchestrator is left"
        if len(hello.holder) > _MAX_HOLDER:
            return f"its HELLO names a holder of {len(hello.holder)} characters; expected at most {_MAX_HOLDER}"
        newest = 0 if found is None else found.epoch
        if hello.epoch > newest + _MOST_TAKEOVERS:
            return (
                f"its HELLO states epoch {hello.epoch}, and the newest of run {hello.run_id!r} is {newest}: expected at most "
                f"{_MOST_TAKEOVERS} more. Look at epoch.json in the run's directory"
            )
        if found is None or hello.epoch > found.epoch or (hello.epoch, hello.holder) == (found.epoch, found.holder):
            return None
        if run is None and self._is_made_anew(hello, found):
            logger.info(
                "run %s was deleted and made anew; what this trainer has of the former one is set aside", hello.run_id
            )
            checkpoint.set_aside(self._output_dir, hello.run_id)
            return None
        return self._older(hello, found)

    def _is_made_anew(self, hello: Hello, found: _Noted) -> bool:
        """Returns whether the run's directory is that of another run than the noted one, and has no step yet."""
        directory = run_directory(self._output_dir, hello.run_id)
        with suppress(ValueError, OSError):
            now = _read(directory / "epoch.json")
            differs = now is not None and bool(now.run and found.run) and now.run != found.run
            return differs and not hello.durable and not published_steps(directory / "checkpoints")
        return False

    def _older(self, hello: Hello, found: _Noted) -> str:
        """Returns why an older process is not heard, and what to do."""
        kept = self._path(hello.run_id).parent
        other = (
            f"If it is another run of that name, stop the trainer, move {kept} elsewhere, and start both again. If only "
            f"epoch.json in its directory was lost, copy {kept / 'epoch.json'} there"
        )
        if not hello.epoch:
            return (
                f"this client states no epoch, as an orchestrator would, and run {hello.run_id!r} belongs to "
                f"{printable(found.holder)} (epoch {found.epoch}). {other}"
            )
        return (
            f"run {hello.run_id!r} was taken over by {printable(found.holder)} (epoch {found.epoch}), and this process has epoch "
            f"{hello.epoch}. That one continues the run; what this one has generated since is not trained. Do not start it "
            f"again. {other}"
        )

    def confirm(self, hello: Hello) -> None:
        """Notes that the process has sent something in its epoch: from now on no older one is heard. Raises `OSError`."""
        path = self._path(hello.run_id)
        with suppress(ValueError):
            found = _read(path)
            if found is not None and (found.epoch, found.holder) == (hello.epoch, hello.holder):
                return
        run = ""
        with suppress(ValueError, OSError):  # the number is missing then, and no run is taken for another
            now = _read(run_directory(self._output_dir, hello.run_id) / "epoch.json")
            run = now.run if now is not None else ""
        content = {"format": FORMAT, "epoch": hello.epoch, "holder": hello.holder, "run": run}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content).encode() + b"\n")

    def _path(self, run_id: str) -> Path:
        return self._output_dir / "trainer" / run_id / "epoch.json"


def _read(path: Path) -> _Noted | None:
    """Returns the newest epoch and its holder; None if there is none. Raises `ValueError` for a damaged file, `OSError`."""
    try:
        match read_json(path, _MAX_BYTES):
            case {"format": 1, "epoch": int(epoch), "holder": str(holder)} as found:
                run = found.get("run", "")
                return _Noted(epoch, holder, run if isinstance(run, str) else "")
            case found:
                raise ValueError(f"{found!r:.80}; expected format {FORMAT}, epoch and holder")
    except FileNotFoundError:
        return None
