"""A step's metrics: one line of `metrics.jsonl`, and one line of the log. `telemetry/endpoint.py` shows them to Prometheus.

The line is also in the step's checkpoint, which is the commit. `repair` makes the file agree with the checkpoint of a resume.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from counterpoint.orchestrator.rollouts.failures import failures_in_words, sum_failures
from counterpoint.run.loop_health.slow_spots import in_words, slow_spots_of
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.files.json_lines import lines_from_end, replace_end
from counterpoint.transport.telemetry.agent_time import agent_times, agents_in_words

logger = logging.getLogger(__name__)

MetricsLine = dict[str, Any]
"""Metric name to number. `step` is always present."""


def newest_committed(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Returns what the file `name` of the newest checkpoints holds, in the order of steps, back to the first step without one.

    Older checkpoints, which `keep_every` keeps, have gaps between them. Raises `OSError`.
    """
    checkpoints, found = run_dir / "checkpoints", list[dict[str, Any]]()
    files = ((step, checkpoints / f"step_{step}" / name) for step in reversed(published_steps(checkpoints)))
    before: int | None = None
    for step, file in ((step, file) for step, file in files if file.exists()):
        if before not in (None, step + 1):
            break
        before = step
        found.append(orjson.loads(file.read_bytes()))
    return found[::-1]


def repair(path: Path, newest_step: int, committed: Iterable[MetricsLine], oldest_step: int = 1) -> None:
    """Makes the file hold each step from `oldest_step` up to `newest_step` once.

    Removes later and torn lines, and adds missing ones from `committed`, which are of the newest steps without a gap. Reads the
    file backwards to the first line of a step before those: earlier lines reached the disk before these commits. Raises
    `OSError`, and the checkpoints then still have the lines of `committed`, all that this removes.
    """
    restored = {line["step"]: line for line in committed if line["step"] <= newest_step}
    first = min(restored, default=newest_step)
    lines = {step: orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for step, line in restored.items()}
    before, start = 0, 0
    found: list[bytes] = []
    for start, raw, line in lines_from_end(path):
        step = line.get("step") if line is not None else None
        if isinstance(step, int) and step < first:
            before, start = step, start + len(raw)
            break
        if isinstance(step, int) and step <= newest_step:
            lines[step] = raw  # of several lines of a step, the first one written is read last
        found.append(raw)
    missing = [step for step in range(max(before + 1, oldest_step), newest_step + 1) if step not in lines]
    if missing:
        logger.warning("%s: the lines of steps %s are lost; the newest checkpoints do not hold them", path, missing)
    after = b"".join(lines[step] for step in sorted(lines))
    if after != b"".join(reversed(found)):
        replace_end(path, start, after)


def newest_step(path: Path) -> int:
    """Returns the step of the file's last line, or 0 if it has none. Raises `OSError`."""
    steps = (line.get("step") for _, _, line in lines_from_end(path) if line is not None)
    return next((step for step in steps if isinstance(step, int)), 0)


def log_step(line: Mapping[str, Any], total_steps: int) -> None:
    """Logs a step in one line: its reward and rollouts, the lag, and its phases in seconds, the longest first."""
    phases = {name.removeprefix("phase/"): value for name, value in line.items() if name.startswith("phase/")}
    ordered = sorted(phases.items(), key=lambda item: -item[1])
    logger.info(
        "step %d/%d  reward %.3f  staleness %.2f  rollouts %d (%d failed, %d filtered, %d cancelled)  policy %d  "
        "lag p99 %.1f ms max %.1f ms  phase breakdown: %s%s%s%s",
        line["step"], total_steps, line["reward/mean"], line["staleness/mean"],
        line["rollouts/completed"], line["rollouts/failed"], line["rollouts/filtered"], line["rollouts/cancelled"],
        line["policy/version"], line["event_loop_lag/p99"] * 1e3, line["event_loop_lag/max"] * 1e3,
        ", ".join(f"{name}={seconds:.4f}" for name, seconds in ordered), _agents(line), _blame(line),
        _failures(line),
    )  # fmt: skip


def _agents(line: Mapping[str, Any]) -> str:
    words = agents_in_words(agent_times([line]))
    return f"  agents: {words}" if words else ""


def _failures(line: Mapping[str, Any]) -> str:
    words = failures_in_words(sum_failures([line]))
    unanswered = line.get("rollouts/inference_failed", 0)
    return (f"  failed: {words}" if words else "") + (
        f"  without an answer from inference: {unanswered}" if unanswered else ""
    )


def _blame(line: Mapping[str, Any]) -> str:
    slow_spots = slow_spots_of([line])
    worst = slow_spots.worst(2)
    return f"  late {slow_spots.moments} times, such as {in_words(worst)}" if worst else ""
