"""Finds and ends what the keeper of a worker, or its actor on Ray, left when it was killed.

All processes of a keeper, itself included, carry its mark in the environment with which they were started.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from counterpoint.transport.files.lock import holder_of
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.transport.process.launch import TRACKER_SECONDS, is_resource_tracker, live_processes

MARK = "CLUSTER_KEEPER"
"""The variable by which every process of a keeper is known, by its socket, or of an actor, by its name, process and start."""

MOST_BYTES = 64 * 1024
"""Longest file of an agent that is read."""

_OF_AN_ACTOR = re.compile(rf"{MARK}=(?P<mark>(?P<name>[^:]+):(?P<pid>\d{{1,9}}):(?P<start>\d{{1,20}}))")

KEEPERS_SECONDS = 1.0
"""How long keepers have to end what is below them, once their actor is dead."""


def start_of(pid: int) -> int | None:
    """Returns when a living process started, in clock ticks since boot; None if there is none, or only its zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def marked(mark: str) -> list[int]:
    """Returns the living processes of this user that carry the mark, this one excluded."""
    wanted = f"{MARK}={mark}".encode()
    return [pid for pid, *_ in live_processes() if pid != os.getpid() and wanted in _environment(pid)]


def kill_steps(mark: str, seconds: float) -> Iterator[list[int]]:
    """Kills everything with the mark; yields what still lives, until nothing does or `seconds` have passed.

    The caller waits a moment after each step. Python's resource trackers are killed last: each removes the shared memory and the
    semaphores of the processes that were killed.
    """
    began = time.monotonic()
    while (found := marked(mark)) and time.monotonic() - began < seconds:
        others = [pid for pid in found if not is_resource_tracker(pid)]
        for pid in others if time.monotonic() - began < TRACKER_SECONDS else found:
            with suppress(ProcessLookupError, PermissionError):  # it has just ended; or it became another user's
                os.kill(pid, signal.SIGKILL)
        yield found


def kill_marked(mark: str, seconds: float = 10.0) -> list[int]:
    """Kills everything with the mark, and waits; returns what could not be killed."""
    for _ in kill_steps(mark, seconds):
        time.sleep(0.005)
    return marked(mark)


def clear_dead(prefix: str, condemned: str = "") -> list[int]:
    """Kills what actors on Ray have left here that live no more; returns what could not be killed.

    Their marks are `<name>:<pid>:<start>` (`start_of`), and begin with the prefix. An actor that lives is left alone, but for the
    `condemned`, by name, which is killed first. Keepers see their actor's end, and have a moment for theirs.
    """
    dead = set[str]()
    for pid, *_ in live_processes():
        for entry in _environment(pid):
            known = _OF_AN_ACTOR.fullmatch(entry.decode(errors="replace"))
            if known is None or not known["name"].startswith(prefix):
                continue
            lives = start_of(int(known["pid"])) == int(known["start"])
            if lives and known["name"] == condemned:
                with suppress(ProcessLookupError):
                    os.kill(int(known["pid"]), signal.SIGKILL)
            if not lives or known["name"] == condemned:
                dead.add(known["mark"])
    began = time.monotonic()
    while any(map(marked, dead)) and time.monotonic() - began < KEEPERS_SECONDS:
        time.sleep(0.02)
    return [pid for mark in dead for pid in kill_marked(mark)]


def _environment(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:  # it has ended, or belongs to somebody else
        return []


def has_agents_of_old(directory: Path) -> bool:
    """Whether an agent of a job in this directory lives, which versions up to 0.1 had on one machine; it ends within its lease.

    A copy of a job's directory names the agents of the original, which are none of its own: nobody holds the lock there.
    """
    for path in (directory / "agents").glob("*.json"):
        try:
            known = read_json(path, MOST_BYTES)
            if start_of(int(known["pid"])) == known["started"] and holder_of(path.with_suffix(".lock")) is not None:
                return True
        except (OSError, ValueError, UntrustedFileError, KeyError, TypeError):
            continue
    return False
