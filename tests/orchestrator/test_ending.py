"""A run whose last step is committed comes to its end whoever was killed before it did, and needs no inference for it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable

import pytest

import counterpoint.orchestrator.ending
from counterpoint.inference.config import PoolConfig
from counterpoint.job.reading.run_state import is_finished
from counterpoint.orchestrator.daemon import run
from counterpoint.run.batch_files import KEPT_FILE
from counterpoint.run.config import RunConfig
from counterpoint.transport.files.atomic import publish_directory, published_steps
from counterpoint.transport.messages import Acknowledged
from counterpoint.transport.process.permanent_errors import PASSING
from tests.orchestrator.daemons import STEPS, assert_whole, metrics_of, started
from tests.orchestrator.scripted_trainer import ScriptedTrainer
from tests.support.polling import DEADLINE_SECONDS, wait_until

pytestmark = pytest.mark.slow

DURABLE = 2
"""The checkpoint that the trainer of `committed` leaves."""


@pytest.fixture
def committed(make_config: Callable[..., RunConfig]) -> RunConfig:
    """What resumes a run that was killed with its last step committed, when the trainer had lost the steps after `DURABLE`. No
    inference server is there any more."""
    config = make_config()

    def lose(batch: object) -> Acknowledged | None:
        step: int = batch.step  # type: ignore[attr-defined]
        return Acknowledged(step, DURABLE) if step > STEPS - 2 else None

    with ScriptedTrainer(config.output_dir, "one", STEPS, answer=lose) as trainer, started(config) as process:
        trainer.wait_for_step(STEPS - 2)
        wait_until(
            lambda: (config.run_dir / "metrics.jsonl").exists() and len(metrics_of(config)) == STEPS, "the last commit"
        )
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_SECONDS)
    for step in published_steps(config.run_dir / "broadcast"):
        if step > DURABLE:
            shutil.rmtree(config.run_dir / f"broadcast/step_{step}")
    nobody = PoolConfig(urls=["http://127.0.0.1:9"], startup_timeout_seconds=0.5)
    return config.model_copy(update={"resume": True, "inference": nobody, "trainer_timeout_seconds": 60})


def leave_checkpoint(config: RunConfig, step: int) -> None:
    """As the trainer does."""
    with publish_directory(config.output_dir / "trainer" / "one" / "checkpoints" / f"step_{step}"):
        pass


def batches(config: RunConfig) -> list[str]:
    return [path.parent.name for path in sorted((config.run_dir / "rollouts").glob("step_*/batch.bin"))]


def test_what_the_trainer_lacks_is_sent_again(committed: RunConfig) -> None:
    ready = []
    with ScriptedTrainer(committed.output_dir, "one", STEPS, checkpoint=DURABLE) as trainer:
        assert run(committed, lambda: ready.append(True)) == 0
        assert trainer.steps_trained == list(range(DURABLE + 1, STEPS + 1))
    assert ready == [True]
    assert_whole(committed)
    assert batches(committed) == []


def test_a_finished_run_asks_the_trainer_and_takes_its_leave(committed: RunConfig) -> None:
    with ScriptedTrainer(committed.output_dir, "one", STEPS, checkpoint=STEPS) as trainer:
        assert run(committed, lambda: None) == 0
        wait_until(lambda: trainer.byes == 1, "BYE")
        assert trainer.steps_trained == []
    assert_whole(committed)
    assert batches(committed) == []


def test_a_run_that_keeps_batches_is_finished_nevertheless(committed: RunConfig) -> None:
    config = committed.model_copy(update={"keep_batches": 2})
    with ScriptedTrainer(config.output_dir, "one", STEPS, checkpoint=STEPS):
        assert run(config, lambda: None) == 0
    leave_checkpoint(config, STEPS)
    kept = [
        step
        for step in published_steps(config.run_dir / "rollouts")
        if (config.run_dir / f"rollouts/step_{step}" / KEPT_FILE).exists()
    ]
    assert kept == [STEPS - 1, STEPS]
    assert is_finished(config)


def test_a_run_may_be_resumed_with_fewer_steps_than_it_has(committed: RunConfig) -> None:
    with ScriptedTrainer(committed.output_dir, "one", STEPS, checkpoint=STEPS - 1):
        assert run(committed.model_copy(update={"steps": STEPS - 2}), lambda: None) == 0
    assert_whole(committed)


def test_a_trainer_that_has_left_is_known_by_its_checkpoint(
    committed: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counterpoint.orchestrator.ending, "SILENCE_SECONDS", 0.1)
    leave_checkpoint(committed, STEPS)
    assert run(committed, lambda: None) == 0
    assert batches(committed) == []
    assert "its checkpoint of the last step exists" in (committed.run_dir / "orchestrator.log").read_text()


def test_a_trainer_that_was_killed_before_it_could_say_it_is_known_by_its_checkpoint_too(
    committed: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To us it still seems to be there."""
    monkeypatch.setattr(counterpoint.orchestrator.ending, "SILENCE_SECONDS", 0.1)

    def train_silently(batch: object) -> Acknowledged:
        step: int = batch.step  # type: ignore[attr-defined]
        if step == STEPS:
            leave_checkpoint(committed, STEPS)
        return Acknowledged(step, DURABLE)

    with ScriptedTrainer(committed.output_dir, "one", STEPS, checkpoint=DURABLE, answer=train_silently):
        assert run(committed, lambda: None) == 0
    assert batches(committed) == []


def test_a_trainer_that_never_comes_back_is_not_waited_for_without_end(committed: RunConfig) -> None:
    leave_checkpoint(committed, STEPS - 1)
    assert run(committed.model_copy(update={"trainer_timeout_seconds": 0.3}), lambda: None) == PASSING
    assert "no trainer was ready for run 'one'" in (committed.run_dir / "orchestrator.log").read_text()
    assert batches(committed) != []
