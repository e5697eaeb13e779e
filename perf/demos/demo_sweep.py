"""`make demo-sweep`: a sweep of four runs beside one trainer, by a job of two workers, one of them killed midway.

Everything is real, and the exit code is 0 if every target succeeded. The job is `configs/demo-fleet.toml`, the sweep
`configs/demo-sweep.toml`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from counterpoint.cluster.process import last_lines
from counterpoint.job.configuration.load import load
from counterpoint.job.directory import is_running
from counterpoint.job.sweep.rows import Row, rows_reader_of
from counterpoint.job.sweep.targets import SweepConfig, targets_of
from counterpoint.transport.process.launch import guarded

FLEET, SWEEP = "configs/demo-fleet.toml", "configs/demo-sweep.toml"
OUTPUT = Path("outputs/demo-sweep")

MIDWAY_STEPS = 20
"""The steps of the run whose worker is killed, at the kill."""

READY_SECONDS = 600.0
SWEEP_SECONDS = 900.0
STOP_SECONDS = 180.0
SAY_SECONDS = 15.0


def main() -> int:
    """Runs the demo. Returns 0 if every target succeeded and no step was lost or repeated."""
    config = load(SweepConfig, Path(SWEEP), [])
    look = rows_reader_of(config, targets_of(config, Path(SWEEP)))
    began = time.monotonic()
    fleet = Command("fleet", "run", FLEET, *(["--fresh"] if OUTPUT.exists() else []))
    try:
        say(f"the fleet starts, one trainer and one vLLM server: {fleet.log}")
        wait_until(fleet_is_ready, READY_SECONDS, "the fleet", [fleet])

        sweep = Command("workers", "sweep", SWEEP, "--workers", "2")
        needed = [fleet, sweep]
        say(f"a job of two workers races for the targets of {SWEEP}: {sweep.log}")
        wait_until(lambda: midway(look()) != [], SWEEP_SECONDS, "a run to be midway", needed, look)
        victim = midway(look())[0]
        killed, name = victim.status.pid, victim.status.target_id
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        say(f"killed process {killed}, the worker of {name}, at step {steps(victim)}: the run's process dies with it")
        wait_until(lambda: row_of(name, look()).status.token != victim.status.token, SWEEP_SECONDS, name, needed, look)
        say(f"a worker has taken {name}, and goes on from its last commit")
        wait_until(lambda: sweep.ended, SWEEP_SECONDS, "the end of the sweep", [fleet], look)
    finally:
        for command in Command.started[::-1]:
            command.stop()
    rows = look()
    subprocess.run([sys.executable, "-m", "counterpoint.cli.main", "sweep", "status", SWEEP], check=True)
    say(
        f"after {time.monotonic() - began:.0f} s: {(verdict := verdict_of(rows, row_of(name, rows))) or 'every target succeeded'}"
    )
    return 1 if verdict else 0


class Command:
    """Starts a `counterpoint` command, under a guardian that ends it when this process ends."""

    started: list[Command] = []

    def __init__(self, name: str, *words: str) -> None:
        self.log = OUTPUT.with_name(f"{OUTPUT.name}-{name}.log")
        self.log.parent.mkdir(exist_ok=True)
        command = guarded([sys.executable, "-m", "counterpoint.cli.main", *words])
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
        self.started.append(self)

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """Ends a process in order, and kills it after `STOP_SECONDS`."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGHUP)  # makes the guardian kill all that is below it
            self._process.wait()


def wait_until(
    condition: Callable[[], bool],
    seconds: float,
    what: str,
    needed: Sequence[Command],
    look: Callable[[], list[Row]] = list,
) -> None:
    """Waits, and prints the state of the runs now and then. Ends the demo at a deadline, or if one of `needed` has ended."""
    began = said_at = time.monotonic()
    while not condition():
        gone = [command for command in needed if command.ended]
        if gone or time.monotonic() - began > seconds:
            quoted = [f"\n{command.log}:\n" + "\n".join(last_lines(command.log)) for command in gone or needed]
            sys.exit(f"waited for {what}, and {'what it needs ended' if gone else 'in vain'}.{''.join(quoted)}")
        if time.monotonic() - said_at > SAY_SECONDS:
            said_at = time.monotonic()
            say("  ".join(f"{row.status.target_id} {row.status.state} {steps(row)}" for row in look()) or f"... {what}")
        time.sleep(0.5)


def fleet_is_ready() -> bool:
    """Returns whether the job runs with every worker ready."""
    processes = OUTPUT / "processes.json"
    workers = json.loads(processes.read_text())["workers"] if processes.exists() else []
    # The file alone may be that of an earlier demo that was killed.
    return is_running(OUTPUT) and bool(workers) and all(worker["state"] == "ready" for worker in workers)


def midway(rows: Sequence[Row]) -> list[Row]:
    """Returns the targets in work that have trained enough steps for a kill to matter."""
    return [row for row in rows if row.status.state == "RUNNING" and step(row) >= MIDWAY_STEPS]


def row_of(target_id: str, rows: Sequence[Row]) -> Row:
    """Returns the row of a target."""
    return next(row for row in rows if row.status.target_id == target_id)


def step(row: Row) -> int:
    """Returns the newest step of a target's runs."""
    assert row.result is not None
    return max(run.step for run in row.result.runs)


def steps(row: Row) -> str:
    """Returns a target's steps, as the table shows them."""
    assert row.result is not None
    return row.result.steps


def verdict_of(rows: Sequence[Row], victim: Row) -> str | None:
    """Returns the fault of the sweep, or None."""
    for row in rows:
        name, lines = row.status.target_id, OUTPUT / f"run_demo.{row.status.target_id}" / "metrics.jsonl"
        if row.status.state != "SUCCESS":
            return f"{name} reads {row.status.state}"
        counted = [json.loads(line)["step"] for line in lines.read_text().splitlines()]
        if counted != list(range(1, step(row) + 1)):
            return f"{name} has lost or repeated steps: {counted}"
    return None if victim.status.attempts == 2 else f"{victim.status.target_id} was not taken over"


def say(text: str) -> None:
    """Prints a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
