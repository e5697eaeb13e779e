"""Servers and outages of a job as its runs see them, and the trainer's runs and slots: `fleet.json`, `trainer/runs.json`.

Several runs may share servers: what they say of one is joined by its URL, requests and rates added up. A view that is old, since
its orchestrator was killed, or that has ended says nothing about now; it counts only where no other one is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from counterpoint.job.reading.rollouts.rollout_records import finite_number
from counterpoint.orchestrator.activity import FLEET_FILE
from counterpoint.run.trainer_files import checkpoints_directory
from counterpoint.trainer.telemetry.published import MAX_RUNS, RUNS_FILE
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.transport.outages import OpenOutage, OutageKind
from counterpoint.transport.printable import shortened

STALE_SECONDS = 20.0
"""Age from which a file counts as left by a process that is gone: it is replaced about once a second."""

MAX_BYTES = 2**20
"""The size of a `fleet.json`; 256 servers take some 200 KB."""

MAX_VIEWS = 128
"""Runs whose files are read: those that wrote last."""

MAX_SERVERS = 256

MAX_TEXT = 500
"""Characters of each text of an outage."""

_STATES = ("out", "unknown", "draining", "loading", "serving")
"""The states of a server, from the worst to the best."""


@dataclass(frozen=True, slots=True)
class View:
    """One run's `fleet.json`. Any value in it may be anything."""

    run: str
    time: float
    ended: bool
    content: Mapping[str, Any]

    def is_current(self, now: float) -> bool:
        """Whether it says how things are now."""
        return not self.ended and now - self.time <= STALE_SECONDS

    @property
    def servers(self) -> list[Mapping[str, Any]]:
        """Its servers."""
        return _objects(self.content.get("servers"), MAX_SERVERS)

    @property
    def outages(self) -> list[OpenOutage]:
        """What is out for it."""
        listed = _objects(self.content.get("outages"), MAX_SERVERS)
        return [found for each in listed if (found := _outage_in(each)) is not None]

    @property
    def obstacle(self) -> str:
        """What keeps the run from its work, in two words; empty if nothing does."""
        if any(outage.kind is OutageKind.TRAINER for outage in self.outages):
            return "no trainer"
        states = [server.get("state") for server in self.servers]
        return "no server" if states and all(state in ("out", "unknown") for state in states) else ""


@dataclass(slots=True)
class ViewedServer:
    """One server, by all runs that use it."""

    url: str
    views: list[tuple[str, float, Mapping[str, Any]]] = field(default_factory=list)
    """Run, time, and what it says of the server."""

    @property
    def newest(self) -> Mapping[str, Any]:
        """What the run that wrote last says."""
        return max(self.views, key=lambda view: view[1])[2]

    @property
    def state(self) -> str:
        """The worst that a run says; `unknown` for anything else."""
        found = {value for _, _, view in self.views if (value := view.get("state")) in _STATES}
        return next((state for state in _STATES if state in found), "unknown")

    @property
    def reason(self) -> str:
        """Why, of a run that says that state."""
        for _, _, view in self.views:
            if view.get("state") == self.state and isinstance(reason := view.get("reason"), str) and reason:
                return reason
        return ""

    def total(self, name: str) -> float | None:
        """Adds up what the runs say; None where none says a number."""
        found = self._numbers(name)
        return sum(found) if found else None

    def most(self, name: str) -> float | None:
        """The largest number that a run says: each counts the same events."""
        return max(self._numbers(name), default=None)

    def cache_hit_share(self) -> float | None:
        """The mean of the runs' shares, weighted by their tokens per second."""
        weighed = [
            (share, finite_number(view.get("tokens_per_second")) or 1e-9)
            for _, _, view in self.views
            if (share := finite_number(view.get("cache_hit_share"))) is not None
        ]
        weight = sum(each for _, each in weighed)
        return sum(share * each for share, each in weighed) / weight if weighed and weight > 0 else None

    def _numbers(self, name: str) -> list[float]:
        return [value for _, _, view in self.views if (value := finite_number(view.get(name))) is not None]


def read_views(directory: Path) -> list[View]:
    """Returns what the runs of a job say, the newest first; files that are missing or damaged are left out."""
    found = []
    for path in directory.glob(f"run_*/{FLEET_FILE}"):
        try:
            if not path.parent.is_symlink():
                found.append((path.stat().st_mtime, path))
        except OSError:
            continue
    views = []
    for _, path in sorted(found, reverse=True)[:MAX_VIEWS]:
        try:
            content = read_json(path, MAX_BYTES)
        except (OSError, UntrustedFileError):
            continue
        time = finite_number(content.get("time"))
        run = path.parent.name.removeprefix("run_")
        views.append(View(run, 0.0 if time is None else time, content.get("ended") is True, content))
    return sorted(views, key=lambda view: -view.time)


def join(views: Iterable[View]) -> list[ViewedServer]:
    """Returns the servers of several views, by URL, at most `MAX_SERVERS`."""
    servers: dict[str, ViewedServer] = {}
    for view in views:
        for described in view.servers:
            url = described.get("url")
            if isinstance(url, str) and (url in servers or len(servers) < MAX_SERVERS):
                servers.setdefault(url, ViewedServer(url)).views.append((view.run, view.time, described))
    return [servers[url] for url in sorted(servers)]


def join_outages(views: Iterable[View]) -> list[tuple[OpenOutage, list[str]]]:
    """Returns the outages of several views by who is out, each with its runs: since the first saw it, for the newest reason."""
    found: dict[str, tuple[OpenOutage, list[str]]] = {}
    for view in sorted(views, key=lambda view: view.time):
        for outage in view.outages:
            former, runs = found.get(outage.who, (outage, []))
            found[outage.who] = replace(outage, since=min(outage.since, former.since)), [*runs, view.run]
    return list(found.values())


def _outage_in(found: Mapping[str, Any]) -> OpenOutage | None:
    since = finite_number(found.get("since"))
    texts = [found.get(name) for name in ("who", "what", "reason")]
    if since is None or found.get("kind") not in set(OutageKind):
        return None
    who, what, reason = (shortened(text, MAX_TEXT) if isinstance(text, str) else "" for text in texts)
    return OpenOutage(OutageKind(found["kind"]), who, what, since, reason) if who else None


def read_trainer(directory: Path) -> Mapping[str, Any] | None:
    """Returns `trainer/runs.json`; None if there is none that can be read."""
    try:
        return read_json(directory / "trainer" / RUNS_FILE, MAX_BYTES)
    except (OSError, UntrustedFileError):
        return None


def runs_of(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the runs that the trainer tells of."""
    return _objects(content.get("runs"), MAX_RUNS)


def steps_in_trainer(directory: Path) -> dict[str, int]:
    """Returns the newest trained step of each run that has a slot of the trainer, by run id."""
    found = ((each.get("run"), each.get("step")) for each in runs_of(read_trainer(directory) or {}))
    return {run: step for run, step in found if isinstance(run, str) and type(step) is int}


def trained_without_lines(directory: Path, run_id: str, in_trainer: Mapping[str, int]) -> dict[int, dict[str, Any]]:
    """Returns the newest trained step of a run without lines in the trainer's metrics, as a driven one; {} before the first.

    `in_trainer` is that of `steps_in_trainer`; a run without a slot has the step of its newest checkpoint.
    """
    step = in_trainer.get(run_id) or max(published_steps(checkpoints_directory(directory, run_id)), default=0)
    return {step: {"step": step}} if step > 0 else {}


def _objects(found: object, most: int) -> list[Mapping[str, Any]]:
    """Returns the objects in a list; none if it is no list."""
    listed: list[Mapping[str, Any]] = (
        [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    )
    return listed[:most]
