"""Names the code that made the event loop late.

The loop beats: a timer records when it is due and how late it ran. A thread watches the beat. While a beat is overdue, the thread
samples the loop's stack and the threads' clocks, at growing intervals. At the next beat
`counterpoint/run/loop_health/blame_evidence.py` finds the reason for each interval; slow spots are collected by place and logged.
While beats are in time, the cost per beat is one timer and the reading of a few clocks. `docs/debugging.md` explains method and
limits.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from counterpoint.run.loop_health.blame_evidence import Evidence, Kind, shares
from counterpoint.run.loop_health.slow_spots import (
    SlowSpot,
    SlowSpots,
    culprits_first,
    in_words,
    merged,
    pool_name,
)
from counterpoint.run.loop_health.stacks import (
    NOWHERE,
    Stack,
    describe,
    is_known,
    place_of,
    source_of,
    stack_of,
)
from counterpoint.run.loop_health.thread_clocks import Reading, ThreadClocks

logger = logging.getLogger(__name__)

_LONGEST_INTERVAL_SECONDS = 1.0
"""Longest time between two samples of a blocked loop."""

_ANNOUNCED_AFTER_SECONDS = 1.0
"""A loop blocked for this long is logged at once, so that the log names the code even if the process is killed."""

_QUIET_SECONDS = 60.0
"""The same place is not logged again within this time; it is still counted."""

_WATCHED_THREADS = 4
"""Clocks of other threads read per beat."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One interval of a late moment, with its reason."""

    seconds: float
    kind: Kind
    stack: Stack = ()
    """The stack of the callback that the loop runs, or of the other thread. Innermost first."""
    task: str = ""
    thread: str = ""


@dataclass(frozen=True, slots=True)
class LateMoments:
    """Number and seconds of late moments since the start. Replaced as a whole, so that two threads need no lock."""

    moments: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    """Seconds of the longest of those that the thread has not reported."""

    def plus(self, seconds: float, reported: LateMoments) -> LateMoments:
        """Returns the sums with one more moment. `reported` are those that the thread has reported."""
        longest = max(seconds, self.longest) if self.moments > reported.moments else seconds
        return LateMoments(self.moments + 1, self.seconds + seconds, longest)


class LoopBlame:
    """Watches the running loop during the `with` block, which must be entered on that loop.

    A moment is late when a timer runs at least `threshold_seconds` after it was due. Timers are due every half of that, so a
    stall of 1.5 times the threshold is always seen and one below it never.
    """

    def __init__(self, threshold_seconds: float) -> None:
        self._threshold = threshold_seconds
        self._period = self._patience = threshold_seconds / 2
        self._ended = LateMoments()
        """The late moments that have ended. Only the loop changes it."""
        self._reported = LateMoments()
        """The late moments that the thread has reported."""
        self._wake_up = threading.Lock()
        """Released to wake the thread. An event would cost several Python calls more per beat."""
        self._stopping = False
        self._failed = False
        """The thread has failed; nothing is watched any more."""
        self._slow_spots = SlowSpots()
        self._lock = threading.Lock()
        """Guards `_slow_spots`; held for a few additions."""
        self._logged: dict[tuple[object, ...], float] = {}
        """The time when each place was last logged, on the monotonic clock, in seconds."""
        self._unlogged: Counter[tuple[object, ...]] = Counter()
        self._runner_frames = 0
        """Number of outermost frames of the loop's thread that run the loop, not a callback."""

    def __enter__(self) -> LoopBlame:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._clocks = ThreadClocks(threading.get_native_id())
        self._due = time.perf_counter() + self._period
        self._timer: asyncio.Handle = self._loop.call_soon(self._beat)
        self._wake_up.acquire()
        self._thread = threading.Thread(target=self._run, name="blame", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._stopping = True
        self._wake_watcher()
        self._thread.join()
        self._clocks.close()

    def take(self) -> SlowSpots:
        """Returns the slow spots since the last call, without a moment that lasts. Not `watched` once watching has failed."""
        with self._lock:
            taken, self._slow_spots = self._slow_spots, SlowSpots()
            taken.watched = not self._failed
        return taken

    # --- on the loop ---

    def _beat(self) -> None:
        now = time.perf_counter()
        late = now - self._due
        if late >= self._threshold:
            self._ended = self._ended.plus(late, self._reported)
        self._due = now + self._period
        if late >= self._patience:
            self._wake_watcher()
        if not self._runner_frames:
            self._runner_frames = len(stack_of(sys._getframe(1)))
        self._timer = self._loop.call_later(self._period, self._beat)

    def _wake_watcher(self) -> None:
        if self._wake_up.locked():
            self._wake_up.release()

    # --- in the thread ---

    def _run(self) -> None:
        """Watches until the end. After a failure the loop continues, and `take` reports that it is not watched."""
        try:
            self._watch()
        except Exception:
            self._failed = True
            logger.critical("the event loop is no longer watched; lateness will not be explained", exc_info=True)

    def _watch(self) -> None:
        calm = self._clocks.read()
        asked = self._due + self._patience
        while not self._stopping:
            self._wake_up.acquire(timeout=max(0.0, asked - time.perf_counter()))
            woken = time.perf_counter()
            if (late := self._ended.seconds - self._reported.seconds) > 0:
                self._report(self._look(calm, late, woken - asked, stuck=False)[0])
            elif woken >= self._due + self._patience:
                self._watch_stall(calm, woken - asked)
            self._clocks.watch(_WATCHED_THREADS)
            calm = self._clocks.read()
            asked = self._due + self._patience

    def _watch_stall(self, calm: Reading, overslept: float) -> None:
        """Samples a loop that is overdue until it beats again."""
        due = since = self._due
        interval = self._patience
        slices: list[Slice] = []
        announced = False
        while self._due == due and not self._stopping:
            now = time.perf_counter()
            seen, calm = self._look(calm, now - since, overslept, stuck=True)
            slices += seen
            since = now
            if now - due >= _ANNOUNCED_AFTER_SECONDS and not announced:
                announced = True
                self._log(_slow_spots(slices), slices, now - due, "has not answered for")
            self._wake_up.acquire(timeout=interval)
            overslept = time.perf_counter() - now - interval
            interval = min(2 * interval, _LONGEST_INTERVAL_SECONDS)
        self._report(slices, announced)

    def _look(self, before: Reading, late: float, overslept: float, *, stuck: bool) -> tuple[list[Slice], Reading]:
        """Returns the reasons of the last `late` seconds, and the clocks now. Without `stuck` the loop runs, and has no stack.

        The thread has just acquired the GIL, so all reads are of one moment unless they take a whole switch interval.
        """
        frames = sys._current_frames()
        stack = stack_of(frames.get(self._loop_thread)) if stuck else ()
        stack = stack[: len(stack) - self._runner_frames]
        if stack and stack[-1][0] is LoopBlame._beat.__code__:
            stack, stuck = (), False  # it beats again at this moment
        task = asyncio.current_task(self._loop) if stuck else None
        clocks = self._clocks.read()
        evidence = Evidence(
            late=late,
            in_callback=bool(stack),
            loop_cpu=None if clocks.loop_cpu is None else clocks.loop_cpu - (before.loop_cpu or 0.0),
            loop_delay=None if clocks.loop_delay is None else clocks.loop_delay - (before.loop_delay or 0.0),
            others_cpu=clocks.others_cpu - before.others_cpu,
            overslept=overslept,
            doing=self._clocks.doing() if stuck else None,
        )
        found: list[Slice] = []
        for kind, seconds in shares(evidence).items():
            match kind:
                case Kind.CALLBACK | Kind.WAIT:
                    found.append(Slice(seconds, kind, stack, task.get_name() if task is not None else ""))
                case Kind.GIL:
                    culprit = self._clocks.busiest()
                    theirs = stack_of(frames.get(culprit.ident or 0)) if culprit is not None else ()
                    found.append(Slice(seconds, kind, theirs, thread=culprit.name if culprit is not None else ""))
                case _:
                    found.append(Slice(seconds, kind))
        del frames  # they keep the threads' objects alive
        return found, clocks

    def _report(self, slices: Sequence[Slice], announced: bool = False) -> None:
        """Counts and logs the late moments that have ended. Lateness below the threshold is ignored."""
        ended, before = self._ended, self._reported
        if ended == before or not slices:
            return
        self._reported = ended
        late = ended.seconds - before.seconds
        # The time after the last sample is spread over the intervals.
        scale = late / sum(part.seconds for part in slices)
        slices = [replace(part, seconds=part.seconds * scale) for part in slices]
        slow_spots = [replace(spot, worst=min(spot.worst, ended.longest)) for spot in _slow_spots(slices)]
        with self._lock:
            self._slow_spots.moments += ended.moments - before.moments
            self._slow_spots.longest = max(self._slow_spots.longest, ended.longest)
            self._slow_spots.add(slow_spots)
        self._log(slow_spots, slices, late, "was late by", always=announced)

    def _log(
        self, slow_spots: Sequence[SlowSpot], slices: Sequence[Slice], late: float, verb: str, *, always: bool = False
    ) -> None:
        """Logs every part of a late moment, unless the first of them was logged recently."""
        ordered = culprits_first(slow_spots, notable_share=0.0)
        slow_spot = ordered[0]
        now = time.monotonic()
        self._unlogged[slow_spot.key] += 1
        if now - self._logged.get(slow_spot.key, -_QUIET_SECONDS) < _QUIET_SECONDS and not always:
            return
        self._logged[slow_spot.key] = now
        often = self._unlogged.pop(slow_spot.key)
        example = next(part for part in slices if _slow_spot(part).key == slow_spot.key)
        details = [
            f"line: {source_of(example.stack)}" if example.stack else "",
            f"task: {example.task}" if example.task and slow_spot.kind is not Kind.GIL else "",
            f"{often} times since the last such line" if often > 1 else "",
            f"stack: {describe(example.stack)}" if example.stack else "",
        ]
        words = in_words(ordered) if len(ordered) > 1 else str(slow_spot)
        logger.warning("the event loop %s %.3f s: %s", verb, late, "; ".join([words, *filter(None, details)]))


def _slow_spots(slices: Sequence[Slice]) -> list[SlowSpot]:
    return merged([_slow_spot(part) for part in slices])


def _slow_spot(part: Slice) -> SlowSpot:
    if not part.stack or (part.thread and not is_known(part.stack)):
        # A thread that runs only its pool's code has finished its work.
        return SlowSpot(part.kind, NOWHERE, "", pool_name(part.thread), part.seconds)
    place = place_of(part.stack)
    outermost = part.stack[-1][0].co_qualname if part.stack and not part.thread else ""
    callback = outermost if outermost != place.function else ""
    return SlowSpot(part.kind, place, callback, pool_name(part.thread), part.seconds)
