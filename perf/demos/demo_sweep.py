"""`make demo-sweep`: a sweep of four runs beside one trainer, by a job of two workers, one of them killed midway.

Everything is real, and the exit code is 0 if every target succeeded. The job is `configs/demo-fleet.toml`, the sweep
`configs/demo-sweep.toml`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from counterpoint.job.configuration.load import load
from counterpoint.job.sweep.rows import TargetRow, rows_reader_of
from counterpoint.job.sweep.targets import SweepConfig, targets_of
from perf.chaos.disk import json_lines
from perf.commands import Command, DemoError, is_ready, log_of, say, until

FLEET, SWEEP = "configs/demo-fleet.toml", "configs/demo-sweep.toml"
OUTPUT = Path("outputs/demo-sweep")

MIDWAY_STEPS = 20
"""The steps of the run whose worker is killed, at the kill."""

SAY_SECONDS = 15.0


def main() -> int:
    """Runs the demo. Returns 0 if every target succeeded and no step was lost or repeated."""
    config = load(SweepConfig, Path(SWEEP), [])
    look = rows_reader_of(config, targets_of(config, Path(SWEEP)))
    began = said_at = time.monotonic()

    def tell() -> None:
        nonlocal said_at
        if time.monotonic() - said_at > SAY_SECONDS:
            said_at = time.monotonic()
            say("  ".join(f"{row.status.target_id} {row.status.state} {steps(row)}" for row in look()))

    with Command(log_of(OUTPUT, "fleet"), "run", FLEET, *(["--fresh"] if OUTPUT.exists() else [])) as fleet:
        say(f"the fleet starts, one trainer and one vLLM server: {fleet.log}")
        until("the fleet", lambda: is_ready(OUTPUT), [fleet])
        with Command(log_of(OUTPUT, "workers"), "sweep", SWEEP, "--workers", "2") as sweep:
            say(f"a job of two workers races for the targets of {SWEEP}: {sweep.log}")
            until("a run to be midway", lambda: midway(look()) != [], [fleet, sweep], tell)
            victim = midway(look())[0]
            killed, name = victim.status.pid, victim.status.target_id
            assert killed is not None
            os.kill(killed, signal.SIGKILL)
            say(
                f"killed process {killed}, the worker of {name}, at step {steps(victim)}: the run's process dies with it"
            )
            until(name, lambda: row_of(name, look()).status.token != victim.status.token, [fleet, sweep], tell)
            say(f"a worker has taken {name}, and goes on from its last commit")
            until("the end of the sweep", lambda: sweep.ended, [fleet], tell)
    rows = look()
    with Command(None, "sweep", "status", SWEEP) as status:
        status.succeed()
    say(
        f"after {time.monotonic() - began:.0f} s: {(verdict := verdict_of(rows, row_of(name, rows))) or 'every target succeeded'}"
    )
    return 1 if verdict else 0


def midway(rows: Sequence[TargetRow]) -> list[TargetRow]:
    """Returns the targets in work that have trained enough steps for a kill to matter."""
    return [row for row in rows if row.status.state == "RUNNING" and step(row) >= MIDWAY_STEPS]


def row_of(target_id: str, rows: Sequence[TargetRow]) -> TargetRow:
    """Returns the row of a target."""
    return next(row for row in rows if row.status.target_id == target_id)


def step(row: TargetRow) -> int:
    """Returns the newest step of a target's runs."""
    assert row.result is not None
    return max(run.step for run in row.result.runs)


def steps(row: TargetRow) -> str:
    """Returns a target's steps, as the table shows them."""
    assert row.result is not None
    return row.result.steps


def verdict_of(rows: Sequence[TargetRow], victim: TargetRow) -> str | None:
    """Returns the fault of the sweep, or None."""
    for row in rows:
        name, metrics = row.status.target_id, OUTPUT / f"run_demo.{row.status.target_id}" / "metrics.jsonl"
        if row.status.state != "SUCCESS":
            return f"{name} reads {row.status.state}"
        counted = [line["step"] for line in json_lines(metrics)]
        if counted != list(range(1, step(row) + 1)):
            return f"{name} has lost or repeated steps: {counted}"
    return None if victim.status.attempts == 2 else f"{victim.status.target_id} was not taken over"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoError as error:
        sys.exit(f"demo-sweep: {error}")
