"""Directories of jobs for the page's tests: small ones that look healthy, and one whose every text is hostile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson

from tests.support.synthetic_jobs import shipped_lines, trained_lines, write_job

HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked=1'>\"'&\u202eevil\u202c\u200f\x1b[2J"
"""Markup, quotes, marks that turn the direction of writing, a terminal's escape."""

LONG = HOSTILE + "W" * 2**20
"""A text of a megabyte without a space."""


def small_job(directory: Path, runs: int = 2, steps: int = 40) -> Path:
    """Writes a job that runs nowhere, its last step now. Returns its directory."""
    write_job(directory, runs, steps, wanted=10 * steps)
    return directory


def append_steps(directory: Path, run: str, first: int, last: int) -> None:
    """Appends steps to a run's files, as its orchestrator and the trainer would."""
    lines = list(shipped_lines(last, time.time(), seed=7))[first - 1 :]
    with (directory / f"run_{run}" / "metrics.jsonl").open("ab") as file:
        file.writelines(orjson.dumps(line) + b"\n" for line in lines)
    with (directory / "trainer" / "metrics.jsonl").open("ab") as file:
        file.writelines(orjson.dumps({"run_id": run, **line}) + b"\n" for line in trained_lines(lines, seed=7))


def hostile_job(directory: Path) -> Path:
    """Writes a job whose metrics, blame, reasons and configuration are hostile. Returns its directory."""
    small_job(directory, runs=2, steps=20)
    run = directory / "run_run-0000"
    lines: list[dict[str, Any]] = [orjson.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    blame = {
        "kind": "callback",
        "function": HOSTILE,
        "file": HOSTILE,
        "line": 1,
        "inside": HOSTILE,
        "callback": HOSTILE,
    }
    for line in lines:
        line[f"reward/{HOSTILE}/mean"] = 0.5
        line[HOSTILE] = line["constructor/n"] = line["__proto__/n"] = 1.0
        line["event_loop_lag/max"] = 0.2
        line["event_loop_blame"] = [{**blame, "thread": HOSTILE, "seconds": 0.2, "worst": 0.2, "count": 1}]
    (run / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    (run / "control" / "evicted.txt").write_text(HOSTILE)
    (directory / "run_run-0001" / "control" / "config_validation_error.txt").write_text(LONG[: 2**16])
    return directory
