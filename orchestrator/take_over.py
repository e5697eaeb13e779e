"""The epoch of a run: a number that grows each time a process takes the run over, by which a trainer knows the newest of two.

A lock holds on one machine only, so two hosts may run one run: one of them from a copy of the directory, while the other is cut
off. Each process proposes the epoch after that in the directory, `epoch.json`, and writes it there once the trainer has accepted
it. So a directory that was superseded by its copy stays so, however often an orchestrator is started in it: its next epoch is one
that another process holds (`trainer/runs/epochs.py`).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.run_directory import ConfigurationError
from transport.files.atomic import write_atomically

FORMAT = 1

EPOCH_FILE = "epoch.json"


@dataclass(frozen=True, slots=True)
class Epoch:
    """The epoch of one process of a run."""

    epoch: int
    holder: str
    """The process, for people, and a random number: no two are alike."""


def propose(run_dir: Path) -> Epoch:
    """Returns the epoch of this process: the one after the newest in the directory. Blocks.

    Raises `ConfigurationError` if the file is damaged, `OSError` as reading does.
    """
    path, newest = run_dir / EPOCH_FILE, 0
    if path.exists():
        try:
            found = json.loads(path.read_bytes())
            newest = int(found["epoch"])
            if found["format"] != FORMAT:
                raise ValueError(f"format {found['format']!r}; this version reads {FORMAT}")
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{path} cannot be read: {error!r}. Restore it; the trainer has it, too, as trainer/<run_id>/{EPOCH_FILE}"
            ) from error
    holder = f"process {os.getpid()} on {socket.gethostname()[:200]}, {secrets.token_hex(8)}"
    return Epoch(newest + 1, holder)


def keep(run_dir: Path, epoch: Epoch) -> None:
    """Writes the epoch, which a trainer has accepted, before anything is sent in it. Blocks. Raises `OSError`."""
    write_atomically(run_dir / EPOCH_FILE, json.dumps({"format": FORMAT} | asdict(epoch)).encode() + b"\n")
