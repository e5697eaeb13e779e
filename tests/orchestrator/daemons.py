"""What the tests of the whole daemon share: it runs in a process of its own, and what it left is read and held to be whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

from counterpoint.run.config import RunConfig
from counterpoint.transport.files.atomic import published_steps
from counterpoint.verify.report import SOUND
from counterpoint.verify.run import verify

STEPS = 5


def metrics_of(config: RunConfig) -> list[dict[str, Any]]:
    """Without a last line that is still being written."""
    whole, _, _ = (config.run_dir / "metrics.jsonl").read_bytes().rpartition(b"\n")
    return [orjson.loads(line) for line in whole.splitlines()]


def records_of(config: RunConfig, step: str = "step_*") -> list[dict[str, Any]]:
    files = (config.run_dir / "rollouts").glob(f"{step}/rollouts.jsonl")
    return [orjson.loads(line) for file in files for line in file.read_bytes().splitlines()]


def assert_whole(config: RunConfig, steps: int = STEPS) -> None:
    """Every step once, in order, in metrics and on disk, every rollout in one step only, and all as the receipts say."""
    assert [line["step"] for line in metrics_of(config)] == list(range(1, steps + 1))
    assert published_steps(config.run_dir / "rollouts") == list(range(1, steps + 1))
    names = [record["rollout_id"] for record in records_of(config)]
    assert len(names) == len(set(names))
    report = verify(config.run_dir)
    assert (report.code, report.steps) == (SOUND, steps), report.text()


@contextmanager
def started(config: RunConfig, fault: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """The daemon in a process, with its standard error in `stderr.txt`; killed if the block leaves it running. `fault` is Python
    that runs in it first."""
    directory = config.output_dir.parent
    (directory / "config.json").write_text(config.model_dump_json())
    program = fault + (
        "import sys, pathlib; from counterpoint.run.config import RunConfig; from counterpoint.orchestrator.daemon import run; "
        "sys.exit(run(RunConfig.model_validate_json(pathlib.Path(sys.argv[1]).read_bytes()), lambda: None))"
    )
    command = [sys.executable, "-c", program, str(directory / "config.json")]
    with (directory / "stderr.txt").open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            yield process
        finally:
            process.kill()
