"""The example of a trainer that drives the other roles: the reward rises, and any role may die."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from counterpoint.cluster import JobSpec, load_spec, submit
from examples.ppo.cartpole import CartPoles
from tests.examples.paced_trainer import ALLOWED
from tests.support.job_workers import send
from tests.support.polling import wait_until

JOB = Path(__file__).parents[2] / "examples" / "ppo" / "job.toml"


def lines_of(directory: Path) -> list[dict[str, float]]:
    """The trainer's whole lines."""
    file = directory / "progress.jsonl"
    data = file.read_bytes() if file.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def wait_for_iteration(directory: Path, iteration: int) -> None:
    wait_until(lambda: len(lines_of(directory)) >= iteration, f"iteration {iteration}", seconds=120)


@pytest.mark.slow
def test_the_reward_rises_although_every_role_dies(tmp_path: Path) -> None:
    """Once each, since each of them starts torch; twice is in `test_pipeline.py`."""
    directory = tmp_path / "job"
    fields = load_spec(JOB).model_dump(mode="json")
    fields["roles"][-1]["worker"] = "tests.examples.paced_trainer:PacedTrainer"
    handle = submit(JobSpec.model_validate(fields), directory)
    try:
        for turn, worker in enumerate(("rollout-1", "critic-0", "actor-0", "trainer-0"), start=1):
            (directory / ALLOWED).write_text(str(2 * turn))
            send(handle, worker, stages=("RUNNING", "FINISH"))
            wait_for_iteration(directory, 2 * turn)
        (directory / ALLOWED).write_text("1000")
        outcome = handle.wait(timeout=240)
    finally:
        handle.stop()
    assert (outcome.code, outcome.reason) == (0, "done")
    lines = lines_of(directory)
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    lengths = [line["length"] for line in lines]
    assert np.mean(lengths[-5:]) > 2.5 * np.mean(lengths[:2])


def test_a_pole_falls_without_balance_and_its_episode_ends() -> None:
    poles, lengths, alive = CartPoles(8, seed=1), [], np.zeros(8)
    for _ in range(60):
        fallen, late, _ = poles.step(np.ones(8, dtype=np.int64))
        assert not late.any()
        alive += 1
        lengths += alive[fallen].tolist()
        alive[fallen] = 0
    assert 7 < np.mean(lengths) < 13  # a constant push: about ten steps, as with Gymnasium's
    assert np.abs(poles.states[:, 2]).max() < 0.21
