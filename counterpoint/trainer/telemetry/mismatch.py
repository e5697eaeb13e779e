"""Says once that a step's mismatch KL is far beyond that of the steps before, with the samples that did it.

So it is where some answers belong to other prompts, come from other weights, or were altered on their way: the mean of a step
then jumps, and most of its samples are as ever. The log has a warning, and `trainer/<run_id>/mismatch.json` has it for
`counterpoint status` and the page. This file imports no torch, since they import it.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.transport.printable import printable, shortened

logger = logging.getLogger(__name__)

FORMAT = 1

FACTOR = 100.0
"""A mismatch this many times the highest of the earlier steps is a jump."""

LEAST = 0.01
"""Nats. Below this a mismatch harms nothing, however small it was before."""

COMPARED_STEPS, LEAST_STEPS = 8, 4
"""Steps before that are compared with: at most, and at least."""

LEAST_EARLY = 1.0
"""Nats, with fewer steps before: no precision and no staleness of a few steps moves the mean that far."""

SAMPLES = 5
"""Samples that a notice names at most."""

SHOWN_STEPS = 20
"""Steps for which a notice is shown."""

_MAX_BYTES = 2**14


@dataclass(frozen=True, slots=True)
class Jump:
    """A step whose mismatch KL is far beyond that of the steps before."""

    step: int
    mismatch_kl: float
    before: float
    """The median of the steps before; 0 if there are none."""
    samples: tuple[tuple[str, float], ...]
    """The rollouts of the samples with the largest, and the mean over the trained tokens of each, in nats."""
    time: float
    """The time at which the step was trained, in Unix seconds."""

    def __str__(self) -> str:
        before = f"after {self.before:.3g} in the steps before" if self.before else "where it should be near 0"
        named = ", ".join(f"{printable(rollout)} ({value:.3g})" for rollout, value in self.samples)
        value = f"mismatch KL of step {self.step} is {self.mismatch_kl:.3g}, {before}"
        return f"{value}; the largest are those of the rollouts {named}"


ADVICE = (
    "look at these rollouts (`counterpoint show`): their tokens are not what the weights give. A server may have other weights, "
    "or something between orchestrator and servers may alter or mix answers"
)


class MismatchWatch:
    """The newest values of each run."""

    def __init__(self, output_dir: Path) -> None:
        """Writes the notices below `output_dir`, the job's."""
        self._output_dir = output_dir
        self._newest: dict[str, deque[float]] = {}

    def begin(self, run_id: str, step: int, before: Iterable[float]) -> None:
        """Begins after `step`; `before` are the values of the steps up to it, the last one last. Raises `OSError`."""
        self._newest[run_id] = deque(before, COMPARED_STEPS)
        if (found := read_jump(self._output_dir, run_id)) is not None and found.step > step:
            _path(self._output_dir, run_id).unlink()

    def take(self, run_id: str, step: int, value: float, samples: Sequence[tuple[str, float]]) -> None:
        """Takes the value of the next step, and says so if it is a jump. `samples` have the largest values, in their order.

        A value that stays high is not said again, as it is one of the steps before. Raises `OSError`.
        """
        newest = self._newest.setdefault(run_id, deque(maxlen=COMPARED_STEPS))
        least = LEAST if len(newest) >= LEAST_STEPS else LEAST_EARLY
        if value >= max(least, FACTOR * max(newest, default=0.0)):
            largest = tuple((rollout, _finite(each)) for rollout, each in samples[:SAMPLES])
            jump = Jump(step, _finite(value), statistics.median(newest or [0.0]), largest, time.time())
            logger.warning("run %s: %s. %s", run_id, jump, ADVICE)
            path = _path(self._output_dir, run_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"format": FORMAT} | asdict(jump)).encode() + b"\n", durable=False)
        if math.isfinite(value):
            newest.append(value)


def _finite(value: float) -> float:
    """Returns the value, or, as a file of JSON has no infinity, the largest number."""
    return min(value, sys.float_info.max)


def read_jump(output_dir: Path, run_id: str) -> Jump | None:
    """Returns the newest notice of a run; None without a usable one. Raises `OSError`."""
    try:
        values = read_json(_path(output_dir, run_id), _MAX_BYTES)
        samples = tuple((shortened(str(rollout), 100), float(value)) for rollout, value in values["samples"][:SAMPLES])
        step, value, before = int(values["step"]), float(values["mismatch_kl"]), float(values["before"])
        return Jump(step, value, before, samples, float(values["time"]))
    except (FileNotFoundError, NotADirectoryError, UntrustedFileError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _path(output_dir: Path, run_id: str) -> Path:
    return output_dir / "trainer" / run_id / "mismatch.json"
