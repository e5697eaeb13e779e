"""Samples the CPU time of the processes below this one, by what they are, so that it is known for any moment of a run."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from pathlib import Path

from perf.noise import below_this, cpu_seconds

SAMPLE_SECONDS = 0.25

_NAMES = {
    "VLLM::EngineCore": "vLLM's engine",
    "counterpoint.inference.plugin.program": "vLLM's API server",
    "counterpoint.cli.main inference": "the server's worker",
    "counterpoint.cli.main trainer": "trainer",
    "counterpoint.cli.main orchestrator": "orchestrator",
    "keeper/main.py": "keepers",
    "launch.py": "guardians",
    "counterpoint.cli.main run": "supervisor",
    "perf.time_to_reward.trl_side": "TRL",
}
"""The names of processes by a part of their command lines; the first that fits counts."""


class CpuClock:
    """The CPU seconds of this process's descendants over time, sampled by a thread during the `with` block.

    A process that has ended counts where its parent has waited for it, as its parent's.
    """

    def __init__(self, without: int | None = None) -> None:
        """Counts all of them but process `without` and those below it."""
        self._without = without
        self._times: list[float] = []
        self._seconds: list[defaultdict[str, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="cpu clock", daemon=True)

    def __enter__(self) -> CpuClock:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            found: defaultdict[str, float] = defaultdict(float)
            for pid in below_this(self._without):
                found[_name(pid)] += cpu_seconds(pid, with_ended=True)
            self._times.append(time.time())
            self._seconds.append(found)

    def at(self, moment: float) -> dict[str, float]:
        """Returns the CPU seconds taken by then, by what took them, interpolated between samples."""
        index = bisect_left(self._times, moment)
        if not self._times or index == 0:
            return dict(self._seconds[0]) if self._seconds else {}
        if index == len(self._times):
            return dict(self._seconds[-1])
        low, high = self._times[index - 1], self._times[index]
        share = (moment - low) / (high - low)
        before, after = self._seconds[index - 1], self._seconds[index]
        return {name: before[name] + share * (after[name] - before[name]) for name in {*before, *after}}


def _name(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "others"  # it has ended
    return next((name for part, name in _NAMES.items() if part in command), "others")
