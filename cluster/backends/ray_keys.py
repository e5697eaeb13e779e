"""The CURVE keys by which agents on other machines know a job's masters: one pair for all masters of a job.

They are in the job's directory, which its masters share, readable by its user only; an agent is given the public key only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import zmq

from counterpoint.transport.wires.endpoint import CurveKeys, load_pair
from counterpoint.transport.wires.key_files import certificate

NAME = "master"


def master_keys(directory: Path) -> CurveKeys:
    """Returns the keys of the job in `directory`; makes them the first time. Raises `OSError`, or `ValueError` for a bad file."""
    agents = directory / "agents"
    file = agents / f"{NAME}.key_secret"
    if not file.exists():
        agents.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make(file)
    try:
        public, secret = load_pair(file)
    except ValueError as error:
        raise ValueError(f"{error}; remove it while no agent of the job lives, and new keys are made") from None
    return CurveKeys(public, public, secret)


def _make(file: Path) -> None:
    """Writes new keys, whole and private from the first moment; what another master has just written stays."""
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as written:
        written.write(certificate(*zmq.curve_keypair()))
        written.flush()
        os.fsync(written.fileno())
    try:
        with contextlib.suppress(FileExistsError):
            os.link(partial, file)
    finally:
        partial.unlink()
