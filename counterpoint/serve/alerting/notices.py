"""Which messages are due: those of problems that began or ended and were not told yet, and that of the job's end. Pure.

Nothing is queued: what is found is compared with what was told. A problem that ends before its message went out gets none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from counterpoint.cluster.worker_view import State
from counterpoint.job.inspection.metrics_lines import is_number
from counterpoint.job.inspection.redaction import redact_line
from counterpoint.job.number_format import duration
from counterpoint.serve.readers.job_facts import JobFacts
from counterpoint.serve.readers.problems import Problem
from counterpoint.transport.printable import clipped

GONE_SECONDS = 30.0
"""A problem has ended once it was not seen for so long: one that comes and goes is one."""

SHOWN_RUNS = 20
LONGEST_MESSAGE = 1000
"""Longest message, in characters."""

_PLAIN = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "@\u200b", "]": "]\u200b"})
"""Slack's control characters, and behind those of Mattermost a space of no width: there `@all` mentions everybody, and
`[words](address)` is a link. Text of a run must not mention anybody or hide an address."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that is due. Equal problems of several runs are one."""

    event: str
    """`problem`, `problem-ended`, `job-finished`, `job-failed` or `job-stopped`."""
    severity: str
    kind: str
    """The problem's kind; empty at the job's end."""
    message: str
    since: float | None
    """The time when it began, in Unix seconds; None if unknown."""
    runs: tuple[str, ...] = ()
    worker: str = ""
    keys: tuple[str, ...] = ()
    """What `Ledger.told` is given once it was sent."""


class Ledger:
    """What was told, and what was found last."""

    def __init__(self, severities: Iterable[str], told: Mapping[str, Any]) -> None:
        """`told` is an earlier ledger's `saved`."""
        self._severities = frozenset(severities)
        self._told = {key: dict(value) for key, value in told.items() if _is_whole(key, value)}
        self._found: dict[str, Problem] = {}

    def observe(self, problems: Sequence[Problem], now: float) -> None:
        """Takes the problems of this moment, errors first."""
        self._found = {}
        for problem in problems:
            if problem.severity in self._severities:
                self._found.setdefault(f"{problem.kind}|{problem.run}|{problem.worker}", problem)
        for key, told in self._told.items():
            told["gone"] = None if key in self._found else told["gone"] or now

    def due(self, now: float) -> list[Notice]:
        """Returns the messages that are due, errors first, and of equal ones the first that began."""
        groups: dict[tuple[str, str, str, str], list[str]] = {}
        for key, problem in self._found.items():
            told = self._told.get(key)
            if told is None or (problem.severity == "error" and told["severity"] != "error"):
                groups.setdefault(("problem", problem.severity, problem.kind, problem.worker), []).append(key)
        for key, told in self._told.items():
            if told["gone"] is not None and now - told["gone"] >= GONE_SECONDS:
                of = ("problem-ended", str(told["severity"]), key.split("|")[0], key.split("|")[2])
                groups.setdefault(of, []).append(key)
        notices = [self._notice(*group, keys) for group, keys in groups.items()]
        return sorted(notices, key=lambda notice: notice.severity != "error")

    def told(self, notice: Notice) -> None:
        """A message was sent, or given up."""
        for key in notice.keys:
            problem = self._found.get(key)
            if notice.event == "problem" and problem is not None:
                self._told[key] = {
                    "severity": problem.severity,
                    "since": problem.since,
                    "reason": _safe(problem.reason),
                    "gone": None,
                }
            else:
                self._told.pop(key, None)

    @property
    def saved(self) -> dict[str, Any]:
        """What was told and has not ended, for JSON."""
        return self._told

    def _notice(self, event: str, severity: str, kind: str, worker: str, keys: list[str]) -> Notice:
        first = keys[0]
        reason, since = (
            (self._found[first].reason, self._found[first].since)
            if event == "problem"
            else (str(self._told[first]["reason"]), self._told[first]["since"])
        )
        gone = self._told[first]["gone"] if event == "problem-ended" else None
        lasted = f" after {duration(gone - since)}" if gone is not None and since is not None else ""
        message = reason if event == "problem" else f"ended{lasted}: {reason}"
        runs = tuple(run for key in keys if (run := key.split("|")[1]))
        return Notice(event, severity, kind, message, since, runs, worker, tuple(keys))


def _safe(reason: str) -> str:
    """Returns it in one line of bounded length, first without what looks like a secret: its name may be in what is cut."""
    return clipped(redact_line(" ".join(reason.split())), LONGEST_MESSAGE)


def _is_whole(key: str, told: object) -> bool:
    """Whether an entry of the file is one of ours. One that is not, such as of another version, counts as never told."""
    match told:
        case {"severity": str(), "reason": str(), "since": since, "gone": gone}:
            return key.count("|") >= 2 and all(each is None or is_number(each) for each in (since, gone))
    return False


def end_of(job: JobFacts) -> Notice:
    """Returns the message of the end of a job whose other workers have ended."""
    own = [run for run in job.runs if not run.is_guest]
    faults = [
        f"{worker['name']} failed: {worker['last_death'] or 'it was killed'}"
        for worker in job.workers
        if worker["state"] == State.FAILED
    ]
    faults += [f"run {run.run_id} was {run.exclusion}" for run in own if run.exclusion is not None]
    left = [f"{run.run_id} after step {run.history.step}" for run in own if run.state != "done"]
    if left and not job.running:
        faults.insert(0, "its command was killed")
    if faults:
        return Notice("job-failed", "error", "", "; ".join(faults[:SHOWN_RUNS]), job.now)
    if left:
        more = f" and {len(left) - SHOWN_RUNS} more" if len(left) > SHOWN_RUNS else ""
        return Notice("job-stopped", "info", "", f"stopped: {', '.join(left[:SHOWN_RUNS])}{more}", job.now)
    return Notice("job-finished", "info", "", f"finished: {len(own)} run{'s' * (len(own) != 1)} done", job.now)


def body_of(notice: Notice, job_id: str, page: str, now: float) -> dict[str, Any]:
    """Returns the JSON of a message: `text`, which Slack and what takes the same hooks show, and fields for programs.

    The message may have text of a run's own: what looks like a secret is hidden, and it is cut at `LONGEST_MESSAGE` characters.
    """
    message = _safe(notice.message)
    run = notice.runs[0] if len(notice.runs) == 1 else ""
    link = f"{page.rstrip('/')}/#/jobs/{quote(job_id, safe='')}" + (f"/runs/{quote(run, safe='')}" if run else "")
    names = ", ".join(notice.runs[:SHOWN_RUNS]) + (" and more" if len(notice.runs) > SHOWN_RUNS else "")
    about = f", run{'s' * (len(notice.runs) > 1)} {names}" if names else f", {notice.worker}" if notice.worker else ""
    kind = f" {notice.kind}" if notice.kind else ""
    text = f"[{notice.severity}] " + f"{job_id}{about}:{kind} {message}".translate(_PLAIN)
    return {
        "text": f"{text}\n{link}" if page else text,
        "event": notice.event,
        "job": job_id,
        "run": run,
        "runs": list(notice.runs[:SHOWN_RUNS]),
        "worker": notice.worker,
        "severity": notice.severity,
        "kind": notice.kind,
        "message": message,
        "since": notice.since,
        "time": now,
        "link": link if page else None,
    }
