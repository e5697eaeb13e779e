"""Checks what a job of the chaos left, from the witness's file, the trainers' commits and the machine itself.

No reader of the product is used: the outcome is plain JSON, a commit plain msgpack, and a process is known by a variable with
which the job's first process was started and which every process inherits.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack

from perf.chaos.report import Findings

LOST_JOBS = "jobs lost"
ORPHANS = "orphans: processes, shared memory or temporary files after the end"
TWICE = "workers that ran twice under one identity"
LOST = "committed or stored records lost"
REPEATED = "committed records repeated"
WRONG = "records that were changed on their way"

FAULTS = (LOST_JOBS, ORPHANS, TWICE, LOST, REPEATED, WRONG)
"""Every kind of fault."""

MARK = "CLUSTER_CHAOS"
"""The variable by which all processes of a job are known. Its value is the job's own."""


def audit(
    job: Path, lines: Sequence[Sequence[Any]], sources: int, processes: Sequence[int], temporary: Path, memory: str
) -> Findings:
    """Audits a job that has ended: its directory, the witness's lines, the processes of it that still live, and its files."""
    findings = Findings(FAULTS)
    findings.counts["jobs"] = 1
    _audit_outcome(job, findings)
    _audit_remains(processes, temporary, memory, findings)
    audit_identities(lines, findings)
    audit_records(lines, committed(job / "commits"), sources, findings)
    return findings


def _audit_outcome(job: Path, findings: Findings) -> None:
    try:
        outcome = json.loads((job / "outcome.json").read_text())
    except (OSError, ValueError) as error:
        findings.faults[LOST_JOBS].append(f"{job}: no outcome can be read: {error}")
        return
    if outcome.get("code") != 0:
        findings.faults[LOST_JOBS].append(f"{job}: {outcome.get('code')}: {outcome.get('reason')}")


def _audit_remains(processes: Sequence[int], temporary: Path, memory: str, findings: Findings) -> None:
    left = [f"process {pid}: {command_line(pid)}" for pid in processes]
    left += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if memory in name]
    left += [str(path) for path in temporary.rglob("*") if not path.is_dir() or path.name.startswith(("tmp", "pymp-"))]
    findings.faults[ORPHANS] += left


def audit_identities(lines: Sequence[Sequence[Any]], findings: Findings) -> None:
    """Looks for a line of an incarnation, or of another process of it, after one of a later incarnation."""
    newest: dict[str, tuple[int, int]] = {}
    told = set()
    for worker, incarnation, pid, *_ in lines:
        now = newest.setdefault(worker, (incarnation, pid))
        if incarnation > now[0]:
            newest[worker] = (incarnation, pid)
        elif (incarnation, pid) != now and (worker, incarnation, pid) not in told:
            told.add((worker, incarnation, pid))
            findings.faults[TWICE].append(
                f"{worker}: incarnation {incarnation}, process {pid}, wrote after incarnation {now[0]}, process {now[1]}"
            )
    findings.counts["workers created"] += len({(worker, incarnation) for worker, incarnation, *_ in lines})


def audit_records(
    lines: Sequence[Sequence[Any]], final: Sequence[Sequence[Any]], sources: int, findings: Findings
) -> None:
    """Compares the trainers' final state with what the sources stored and with what was committed on the way.

    `final` has origin, position and square of each committed record.
    """
    ends: dict[str, set[int]] = defaultdict(set)
    stored: dict[str, int] = defaultdict(lambda: -1)
    commits: Counter[tuple[str, int]] = Counter()
    lost, repeated, wrong = findings.faults[LOST], findings.faults[REPEATED], findings.faults[WRONG]
    for worker, incarnation, _, what, detail, *_ in lines:
        if what == "stored":
            stored[worker] = max(stored[worker], detail)
        elif what == "opens" and detail <= stored[worker]:
            lost.append(f"{worker}: incarnation {incarnation} begins at {detail}, but {stored[worker]} was stored")
        elif what == "ends":
            ends[worker].add(detail)
        elif what == "commits":
            commits.update((origin, position) for origin, position in detail)
    there = Counter((origin, position) for origin, position, _ in final)
    for rank in range(sources):
        name = f"source-{rank}"
        if len(ends[name]) != 1:
            lost.append(f"{name} ended at {sorted(ends[name])}; expected one end")
            continue
        lost += [f"{name}: {position}" for position in range(next(iter(ends[name]))) if not there[name, position]]
    lost += [
        f"{origin}: {position}, which was committed" for origin, position in commits if not there[origin, position]
    ]
    repeated += [f"{origin}: {position} {count} times" for (origin, position), count in there.items() if count > 1]
    repeated += [
        f"{origin}: {position} committed {count} times" for (origin, position), count in commits.items() if count > 1
    ]
    wrong += [f"{origin}: {position} became {square}" for origin, position, square in final if square != position**2]
    wrong += [
        f"{origin}: {position}, which nobody put"
        for origin, position in there
        if position >= max(ends[origin], default=0)
    ]
    findings.counts["records committed"] += len(final)


def committed(folder: Path) -> list[list[Any]]:
    """Returns the final state of all trainers together."""
    final: list[list[Any]] = []
    for path in sorted(folder.glob("*.msgpack")):
        final += msgpack.unpackb(path.read_bytes(), strict_map_key=False)["state"]
    return final


def marked(mark: str) -> list[int]:
    """Returns the living processes that have the mark in their environment, zombies excluded."""
    wanted = f"{MARK}={mark}".encode()
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid())
    return [pid for pid in pids if wanted in environment_of(pid)]


def environment_of(pid: int) -> list[bytes]:
    """Returns the environment with which a process was started; empty for one that has ended, or is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def parent_of(pid: int) -> int:
    """Returns the parent of a process; 0 for one that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except OSError:
        return 0


def command_line(pid: int) -> str:
    """Returns the command of a process; empty for one that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return ""
