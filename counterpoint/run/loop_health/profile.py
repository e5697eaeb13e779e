"""Samples what the event loop's thread does for some seconds: a profile, as collapsed stacks and as speedscope's JSON.

A thread takes samples as `blame.py` does (`stacks.py`): code objects and offsets only, in microseconds; names are found when it
is over. A sample counts for the time since the one before it, so that a long call that holds the GIL, during which no sample
can be taken, has its whole length. Asleep, the loop shows as `(waiting)`.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from counterpoint.run.loop_health.stacks import Stack, frame_name, stack_of
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.transport.files.atomic import write_atomically

INTERVAL_SECONDS = 0.01
"""Seconds between two samples."""

MAX_STACKS = 10_000
"""Different stacks that are kept; further ones count as `OTHERS`."""

MAX_DEPTH = 128
"""Innermost frames that are kept of a stack."""

KEPT_PROFILES = 20

WAITING, OTHERS = "(waiting)", "(others)"

SPEEDSCOPE, COLLAPSED = ".speedscope.json", ".collapsed.txt"


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds by stack: `samples` of them were taken in `seconds`. The empty stack is that of a loop that waits."""

    seconds: float
    samples: int
    stacks: dict[Stack, float]
    others: float = 0.0
    """Seconds of stacks beyond `MAX_STACKS`."""


async def profile_loop(seconds: float, interval: float = INTERVAL_SECONDS) -> Profile:
    """Samples the running loop for `seconds`. Cancelling ends it."""
    loop, ended, stopping = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    runner = await _runner_frames(loop)
    sampler = _Sampler(threading.get_ident(), runner, seconds, interval, stopping)

    def sample() -> None:
        try:
            sampler.run()
        finally:
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended.set)

    thread = threading.Thread(target=sample, name="profile", daemon=True)
    thread.start()
    try:
        await ended.wait()
    finally:
        stopping.set()
    thread.join()  # it has only to return
    if sampler.failure is not None:
        raise sampler.failure
    return sampler.profile()


async def _runner_frames(loop: asyncio.AbstractEventLoop) -> int:
    """Returns the number of outermost frames of the loop's thread that run the loop, not a callback."""
    found: asyncio.Future[int] = loop.create_future()
    loop.call_soon(lambda: found.set_result(len(stack_of(sys._getframe(1)))))
    return await found


class _Sampler:
    """Takes the samples, in its thread."""

    def __init__(
        self, loop_thread: int, runner: int, seconds: float, interval: float, stopping: threading.Event
    ) -> None:
        self._loop_thread, self._runner = loop_thread, runner
        self._seconds, self._interval = seconds, interval
        self._stopping = stopping
        self._weights: dict[Stack, float] = {}
        self._others = 0.0
        self._samples = 0
        self._lasted = 0.0
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001 - of a thread: the coroutine that waits for it raises it
            self.failure = error

    def _run(self) -> None:
        began = before = time.perf_counter()
        while before - began < self._seconds and not self._stopping.wait(self._interval):
            frame = sys._current_frames().get(self._loop_thread)
            stack = stack_of(frame)
            del frame  # it keeps its objects alive
            now = time.perf_counter()
            self._count(stack[: max(0, len(stack) - self._runner)][:MAX_DEPTH], now - before)
            before = now
        self._lasted = before - began

    def _count(self, stack: Stack, seconds: float) -> None:
        self._samples += 1
        if stack in self._weights or len(self._weights) < MAX_STACKS:
            self._weights[stack] = self._weights.get(stack, 0.0) + seconds
        else:
            self._others += seconds

    def profile(self) -> Profile:
        return Profile(self._lasted, self._samples, dict(self._weights), self._others)


def collapsed(profile: Profile) -> bytes:
    """Formats the stacks as flamegraph.pl reads them: `outer;inner MICROSECONDS`, the longest first."""
    totals: Counter[str] = Counter()
    for names, seconds in _named(profile):
        totals[";".join(name.replace(";", ",") for name in names)] += round(seconds * 1e6)
    return "".join(f"{names} {microseconds}\n" for names, microseconds in totals.most_common()).encode()


def speedscope(profile: Profile, name: str) -> bytes:
    """Formats the stacks as https://www.speedscope.app/file-format-schema.json, a sampled profile in seconds."""
    frames: dict[str, int] = {}
    samples: list[list[int]] = []
    weights: list[float] = []
    for names, seconds in _named(profile):
        samples.append([frames.setdefault(each, len(frames)) for each in names])
        weights.append(seconds)
    sampled: dict[str, Any] = {
        "type": "sampled", "name": name, "unit": "seconds", "startValue": 0, "endValue": sum(weights),
        "samples": samples, "weights": weights,
    }  # fmt: skip
    content = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": "counterpoint",
        "name": name,
        "activeProfileIndex": 0,
        "shared": {"frames": [{"name": each} for each in frames]},
        "profiles": [sampled],
    }
    return orjson.dumps(content)


def _named(profile: Profile) -> list[tuple[list[str], float]]:
    """Returns the stacks by the names of their frames, the outermost first, with their seconds."""
    named = [
        ([frame_name(position) for position in reversed(stack)] or [WAITING], seconds)
        for stack, seconds in profile.stacks.items()
    ]
    return named + [([OTHERS], profile.others)] * (profile.others > 0)


async def write_profile(directory: Path, name: str, profile: Profile) -> None:
    """Writes both files, and removes those of all but the newest profiles. Raises `OSError`."""
    await in_thread(_write, directory, name, profile)


def _write(directory: Path, name: str, profile: Profile) -> None:
    directory.mkdir(exist_ok=True)
    write_atomically(directory / f"{name}{COLLAPSED}", collapsed(profile))
    write_atomically(directory / f"{name}{SPEEDSCOPE}", speedscope(profile, name))
    files = sorted(directory.glob(f"*{SPEEDSCOPE}"), key=lambda path: path.stat().st_mtime_ns)
    for old in files[:-KEPT_PROFILES]:
        old.unlink(missing_ok=True)
        (directory / f"{old.name.removesuffix(SPEEDSCOPE)}{COLLAPSED}").unlink(missing_ok=True)
