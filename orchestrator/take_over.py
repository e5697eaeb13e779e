"""The epoch of a run: a number that grows each time a process takes the run over, by which a trainer knows the newest of two.

A lock holds on one machine only, so two hosts may run one run: one of them from a copy of the directory, while the other is cut
off. Each process proposes the epoch after that in the directory, `epoch.json`, and writes it there once the trainer has
accepted it. Thus a directory that was superseded by its copy stays so, however often an orchestrator is started in it: another
process holds its next epoch (`counterpoint/trainer/runs/epochs.py`).

The file also names the run by a random number. A copy keeps it, and a directory that was made anew has another. By it a trainer
tells another run of the same name from one that was taken over.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.transport.files.atomic import write_atomically

FORMAT = 1

EPOCH_FILE = "epoch.json"


@dataclass(frozen=True, slots=True)
class Epoch:
    """The epoch of one process of a run."""

    epoch: int
    holder: str
    """The process, for people, and a random number, so that no two are alike."""
    run: str
    """A random number of the run, made once in its directory."""


def propose(run_dir: Path) -> Epoch:
    """Returns the epoch of this process: the one after the newest in the directory, which then has a file. Blocks.

    Raises `ConfigurationError` if the file is damaged, and `OSError`.
    """
    path, newest, run = run_dir / EPOCH_FILE, 0, secrets.token_hex(8)
    if path.exists():
        try:
            found = json.loads(path.read_bytes())
            newest, run = int(found["epoch"]), str(found.get("run", run))
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']!r}; this version reads {FORMAT}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} cannot be read: {error!r}. Restore it; the trainer has it, too, as trainer/<run_id>/{EPOCH_FILE}"
            ) from error
    else:
        keep(run_dir, Epoch(0, "", run))  # the trainer looks for the run's number
    holder = f"process {os.getpid()} on {socket.gethostname()[:200]}, {secrets.token_hex(8)}"
    return Epoch(newest + 1, holder, run)


def keep(run_dir: Path, epoch: Epoch) -> None:
    """Writes an epoch that a trainer has accepted, before anything is sent in it. Blocks. Raises `OSError`."""
    write_atomically(run_dir / EPOCH_FILE, json.dumps({"format": FORMAT} | asdict(epoch)).encode() + b"\n")
