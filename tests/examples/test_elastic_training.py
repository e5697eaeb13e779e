"""The example of elastic training as a whole job: whatever happens to its workers, it ends with the same bits."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster import JobSpec, load_spec, submit
from counterpoint.transport.process.ranks.node import alone
from tests.support.job_workers import send
from tests.support.polling import wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic_training"

STEPS = 300
"""With a second each, more than all waits of the test, until it asks the script to hurry."""


def job_of(training: Path) -> JobSpec:
    """The example's job with two workers, training in that directory."""
    fields = load_spec(EXAMPLE / "job.toml").model_dump(mode="json")
    (role,) = fields["roles"]
    arguments = [str(training), "--steps", str(STEPS), "--step-seconds", "1"]
    config = role["config"] | {"script": str(EXAMPLE / "train.py"), "arguments": arguments}
    role |= {"count": 2, "max_count": 3, "max_restarts": 20, "config": config | {"max_workers": 3, "join_seconds": 120}}
    return JobSpec.model_validate(fields)


def steps_of(training: Path) -> list[dict[str, Any]]:
    """The script's whole lines."""
    file = training / "progress.jsonl"
    data = file.read_bytes() if file.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def wait_for_step(training: Path, ranks: int, what: str) -> None:
    """Waits until that many ranks have made a step that is not yet done."""
    before = len(steps_of(training))
    wait_until(
        lambda: any(line["ranks"] == ranks for line in steps_of(training)[before:]), f"a step {what}", seconds=120
    )


def ranks_of(training: Path) -> set[str]:
    """The processes that name the training's directory."""
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(training).encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.add(entry.name)
        except OSError:
            continue  # it has ended
    return found


@pytest.mark.slow
def test_a_job_that_loses_and_gains_workers_ends_where_an_undisturbed_one_ends(tmp_path: Path) -> None:
    training, calm = tmp_path / "disturbed", tmp_path / "undisturbed"
    # Meanwhile, since it takes as long as it takes to start torch.
    calm_command = (sys.executable, str(EXAMPLE / "train.py"), str(calm), "--steps", str(STEPS))
    with closing(alone(calm_command, 1)) as undisturbed:
        handle = submit(job_of(training), tmp_path / "job", standby=False)
        try:
            wait_for_step(training, 2, "of two workers")
            send(handle, "trainer-master", signal.SIGKILL)
            goes_on = "goes on under a new incarnation of its SubMaster"
            wait_until(lambda: goes_on in handle.logs("trainer-master", 1000), goes_on)
            wait_for_step(training, 2, "under another SubMaster")
            send(handle, "trainer-0", signal.SIGSTOP)
            wait_for_step(training, 2, "after a silence")
            # Both at once, and then three: each round of ranks starts torch twice for each worker.
            send(handle, "trainer-1", signal.SIGKILL)
            send(handle, "trainer-0", signal.SIGTERM)
            handle.scale("trainer", 3)
            wait_for_step(training, 3, "of three workers, after a death and a request to end by another hand")
            (training / "hurry").touch()
            outcome = handle.wait(timeout=120)
        finally:
            handle.stop()
        wait_until(lambda: undisturbed.poll() is not None, "the undisturbed run", seconds=120)
        assert undisturbed.succeeded, undisturbed.failure
    assert (outcome.code, outcome.reason) == (0, "done")
    results = [json.loads((directory / "result.json").read_text()) for directory in (training, calm)]
    assert results[0] == results[1]
    steps = [line["step"] for line in steps_of(training)]
    assert steps == sorted(set(steps))  # none was done again after it was in a checkpoint
    wait_until(lambda: not ranks_of(training), "the end of all ranks")
