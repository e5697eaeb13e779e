"""Many runs in one real trainer over the real wire: they come, wait, go and fail without the others noticing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.loop import EVICTED
from counterpoint.trainer.losses.contract import LossInputs, LossOutputs
from counterpoint.trainer.losses.load import TRIED_TOKENS
from counterpoint.trainer.runs.control_files import evict
from counterpoint.trainer.work.sessions import MAX_REFUSALS
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.messages import Acknowledged, Evicted, Ready, Waiting
from tests.support.batches import with_changes
from tests.support.polling import DEADLINE_SECONDS, until
from tests.trainer.conftest import WINDOW, make_batch, make_run_config
from tests.trainer.orchestrator_end import (
    Feeder,
    ended,
    feeder,
    log_path,
    metrics_lines,
    send_signal,
    trainer_process,
    write_run,
)

pytestmark = pytest.mark.slow


def configure(output_dir: Path, model: Path, run_id: str, **training: Any) -> None:
    """A run's directory, with an adapter to be trained."""
    config = make_run_config(output_dir, model, **{"lora": {"rank": 2}, **training})
    write_run(config.model_copy(update={"run_id": run_id}))


def trainer(output_dir: Path, model: Path, max_runs: int, **more: Any) -> TrainerConfig:
    return TrainerConfig.model_validate(
        {
            "output_dir": output_dir,
            "model": str(model),
            "threads": 1,
            "max_runs": max_runs,
            "max_tokens": 64,
            "keep_broadcasts": 9,
            **more,
        }
    )


def adapter(output_dir: Path, run_id: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(output_dir / f"run_{run_id}" / "broadcast" / f"step_{step}" / "adapter_model.safetensors")


async def until_trained(output_dir: Path, run_id: str, step: int) -> None:
    """Until the metrics line of a run's step is there, which comes after its weights."""
    await until(
        lambda: (run_id, step) in {(line["run_id"], line["step"]) for line in metrics_lines(output_dir)},
        f"step {step} of {run_id}",
        DEADLINE_SECONDS,
    )


async def train_to_the_end(end: Feeder, run_id: str, steps: int) -> None:
    await end.until(Ready)
    assert end.ready is not None
    for step in range(end.ready.next_step, steps + 1):
        await end.train(make_batch(step, run_id=run_id))
    await end.until(Acknowledged, durable=steps)


async def test_two_runs_train_side_by_side_as_each_would_alone(dense_directory: Path, tmp_path: Path) -> None:
    # AdamW divides by the gradient's size: where that is near zero, the order of a sum moves a weight by a share of the rate.
    rates = {"one": 3e-4, "two": 1e-3}
    for run_id, rate in rates.items():
        alone = tmp_path / run_id
        configure(alone, dense_directory, run_id, learning_rate=rate)
        with trainer_process(trainer(alone, dense_directory, 1)) as process:
            async with feeder(trainer(alone, dense_directory, 1), run_id) as end:
                await train_to_the_end(end, run_id, 4)
            assert await ended(process) == 0
    together = tmp_path / "together"
    config = trainer(together, dense_directory, 2)
    for run_id, rate in rates.items():
        configure(together, dense_directory, run_id, learning_rate=rate)
    with trainer_process(config) as process:
        async with feeder(config, "one") as one, feeder(config, "two") as two, asyncio.TaskGroup() as tasks:
            tasks.create_task(train_to_the_end(one, "one", 4))
            tasks.create_task(train_to_the_end(two, "two", 4))
        assert await ended(process) == 0, log_path(config).read_text()
    lines = metrics_lines(together)
    for run_id in rates:
        assert [line["step"] for line in lines if line["run_id"] == run_id] == [1, 2, 3, 4]
        for step in (0, 4):
            expected, found = adapter(tmp_path / run_id, run_id, step), adapter(together, run_id, step)
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)
    assert any(not torch.equal(adapter(together, "one", 4)[name], tensor) for name, tensor in found.items())


async def test_a_run_beyond_the_slots_is_told_and_has_the_slot_of_one_that_pauses(
    dense_directory: Path, tmp_path: Path
) -> None:
    config = trainer(tmp_path, dense_directory, 1)
    for run_id in ("first", "second"):
        configure(tmp_path, dense_directory, run_id, steps=2, checkpoint_interval=99)
    with trainer_process(config) as process:
        async with feeder(config, "first") as first, feeder(config, "second") as second:
            await first.until(Ready, next_step=1)
            reason = "all 1 slots (trainer.max_runs) are taken; it is number 1 of 1 that wait"
            await second.until(Waiting, reason=reason)
            await first.train(make_batch(1, run_id="first"))
            await until_trained(tmp_path, "first", 1)
            await first.link.close()
            await second.until(Ready, next_step=1)
            checkpoints = tmp_path / "trainer" / "first" / "checkpoints"
            await until(lambda: published_steps(checkpoints) == [1], "the checkpoint of the first", DEADLINE_SECONDS)
            async with feeder(config, "first") as again:
                await again.until(Waiting, reason=reason)
                await second.train(make_batch(1, run_id="second"), make_batch(2, run_id="second"))
                await second.until(Acknowledged, durable=2)
                await second.link.close()
                await again.until(Ready, next_step=2)
                await again.train(make_batch(2, run_id="first"))
                await again.until(Acknowledged, durable=2)
        assert await ended(process) == 0, log_path(config).read_text()
    steps = [(line["run_id"], line["step"]) for line in metrics_lines(tmp_path)]
    assert steps == [("first", 1), ("second", 1), ("second", 2), ("first", 2)]


async def test_a_run_deleted_while_another_has_its_slot_is_not_continued_under_its_name(
    dense_directory: Path, tmp_path: Path
) -> None:
    config = trainer(tmp_path, dense_directory, 1)
    for run_id in ("first", "second"):
        configure(tmp_path, dense_directory, run_id, steps=2, checkpoint_interval=1)
    with trainer_process(config) as process:
        async with feeder(config, "first") as first:
            await first.until(Ready, next_step=1)
            await first.train(make_batch(1, run_id="first"))
            await until_trained(tmp_path, "first", 1)
        async with feeder(config, "second") as second:
            await second.until(Ready, next_step=1)
            (tmp_path / "run_first").rename(tmp_path / "deleted")
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not (tmp_path / "trainer" / ".deleted-first").exists():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            configure(tmp_path, dense_directory, "first", steps=1)
            await second.train(*(make_batch(step, run_id="second") for step in (1, 2)))
            await second.until(Acknowledged, durable=2)
            async with feeder(config, "first") as again:
                await again.until(Waiting)
                await second.link.close()
                await again.until(Ready, next_step=1)
                await again.train(make_batch(1, run_id="first"))
                await again.until(Acknowledged, durable=1)
        assert await ended(process) == 0, log_path(config).read_text()


def raises(inputs: LossInputs) -> LossOutputs:
    """A loss that an operator got wrong, as its first call does not show."""
    if len(inputs.advantages_P) > TRIED_TOKENS:
        raise KeyError("advantage")
    return LossOutputs(inputs.trainer_log_probabilities_P, torch.zeros_like(inputs.advantages_P, dtype=torch.bool))


async def outside_the_vocabulary(end: Feeder) -> None:
    batch = make_batch(1, run_id="bad")
    batch.token_ids_T[3] = 1_000_000
    await end.send(batch)


async def not_a_number(end: Feeder) -> None:
    advantages = np.full_like(make_batch(1).advantages_T, np.nan)
    await end.send(with_changes(make_batch(1, run_id="bad"), advantages_T=advantages))


async def a_reward_that_is_not_a_number(end: Feeder) -> None:
    batch = make_batch(1, run_id="bad")
    first, *others = batch.samples
    await end.send(replace(batch, samples=(replace(first, reward=float("nan")), *others)))


async def more_than_its_share(end: Feeder) -> None:
    for step in (2, 3):
        await end.send(make_batch(step, run_id="bad", lengths=(60,) * 50))


async def beyond_its_credit(end: Feeder) -> None:
    for step in range(20, 20 + MAX_REFUSALS + 1):
        await end.send(make_batch(step, run_id="bad"))


async def one_batch(end: Feeder) -> None:
    await end.send(make_batch(1, run_id="bad"))


@pytest.mark.parametrize(
    ("offend", "training", "reason"),
    [
        (outside_the_vocabulary, {}, "step 1: sample 0 (1-0), token 3: id 1000000 is outside"),
        (not_a_number, {}, "step 1: sample 0 (1-0): advantages_T is nan"),
        (a_reward_that_is_not_a_number, {}, "step 1: sample 0 (1-0): reward is nan"),
        (more_than_its_share, {}, "a run may use at most 50000"),
        (
            beyond_its_credit,
            {},
            "step 28: this trainer trains step 1 next and holds 4 batches; it was rejected 8 times before",
        ),
        (one_batch, {"loss": {"kind": f"{__name__}:raises"}}, "the loss of step 1 raised KeyError"),
    ],
)
async def test_a_run_that_sends_what_cannot_be_trained_is_evicted_and_it_alone(
    dense_directory: Path,
    tmp_path: Path,
    offend: Callable[[Feeder], Awaitable[None]],
    training: dict[str, Any],
    reason: str,
) -> None:
    config = trainer(tmp_path, dense_directory, 2, max_waiting_bytes=100_000, allowed_imports=[f"{__name__}:raises"])
    configure(tmp_path, dense_directory, "bad", **training)
    configure(tmp_path, dense_directory, "good")
    with trainer_process(config) as process:
        async with feeder(config, "good") as good, feeder(config, "bad") as bad:
            await good.until(Ready)
            await bad.until(Ready)
            await good.train(make_batch(1, run_id="good"))
            await offend(bad)
            evicted = await bad.until(Evicted)
            assert isinstance(evicted, Evicted)
            assert reason in evicted.reason
            assert reason in (tmp_path / "run_bad" / "control" / "evicted.txt").read_text()
            await good.train(*(make_batch(step, run_id="good") for step in (2, 3, 4)))
            await good.until(Acknowledged, durable=4)
        assert await ended(process) == 0, log_path(config).read_text()
    assert [(line["run_id"], line["step"]) for line in metrics_lines(tmp_path)] == [
        ("good", step) for step in (1, 2, 3, 4)
    ]


async def test_a_run_whose_weights_cannot_be_published_is_evicted_and_it_alone(
    dense_directory: Path, tmp_path: Path
) -> None:
    """At its first version or at a later one: its directory is another user's, say, or somebody is deleting it."""
    config = trainer(tmp_path, dense_directory, 3)
    for run_id in ("good", "first", "later"):
        configure(tmp_path, dense_directory, run_id)
    (tmp_path / "run_first" / "broadcast").write_text("in the way")
    with trainer_process(config) as process:
        async with feeder(config, "good") as good, feeder(config, "first") as first, feeder(config, "later") as later:
            refused = await first.until(Evicted)
            await later.until(Ready)
            (tmp_path / "run_later" / "broadcast").rename(tmp_path / "run_later" / "gone")
            (tmp_path / "run_later" / "broadcast").write_text("in the way")
            await later.send(make_batch(1, run_id="later"))
            evicted = await later.until(Evicted)
            for version, message in enumerate((refused, evicted)):
                assert isinstance(message, Evicted)
                assert f"version {version} of its weights cannot be published" in message.reason
            await train_to_the_end(good, "good", 4)
        assert await ended(process) == 0, log_path(config).read_text()
    assert published_steps(tmp_path / "trainer" / "later" / "checkpoints") == []


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_run_whose_row_raises_is_evicted_and_the_others_train_as_if_it_had_not_been_there(
    windowed_directory: Path, tmp_path: Path, processes: int
) -> None:
    """In the midst of a step that all three share rows of, with one rank and with two."""
    steps = {run_id: [make_batch(step, (14, 9, 12, 16), run_id) for step in (1, 2)] for run_id in ("one", "two")}

    async def train(end: Feeder, run_id: str) -> None:
        await end.until(Ready)
        await end.train(*steps[run_id])
        await end.until(Acknowledged, durable=2)

    for job in ("without", "with"):
        directory = tmp_path / job
        config = trainer(directory, windowed_directory, 3, processes=processes)
        for run_id in ("one", "two", "bad")[: 2 + (job == "with")]:
            # AdamW would make much of the order of a sum where a gradient is near zero.
            configure(directory, windowed_directory, run_id, steps=2, optimizer="sgd", learning_rate=0.1)
        with trainer_process(config) as process:
            async with feeder(config, "one") as one, feeder(config, "two") as two, AsyncExitStack() as stack:
                if job == "with":
                    bad = await stack.enter_async_context(feeder(config, "bad"))
                    await bad.until(Ready)
                    await bad.send(make_batch(1, (5, WINDOW + 1, 5), "bad"))
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(train(one, "one"))
                    tasks.create_task(train(two, "two"))
                if job == "with":
                    evicted = await bad.until(Evicted)
                    assert isinstance(evicted, Evicted)
                    assert "step 1" in evicted.reason
                    assert "a sample of 17 tokens is longer than the attention window of 16" in evicted.reason
            assert await ended(process) == 0, log_path(config).read_text()
    for run_id in ("one", "two"):
        expected, found = (adapter(tmp_path / job, run_id, 2) for job in ("without", "with"))
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-7)
        first = adapter(tmp_path / "with", run_id, 0)
        assert any(not torch.equal(first[name], found[name]) for name in found), "nothing was trained"


async def test_a_trainer_all_of_whose_runs_were_evicted_says_so(dense_directory: Path, tmp_path: Path) -> None:
    config = trainer(tmp_path, dense_directory, 2)
    for run_id in ("one", "two"):
        configure(tmp_path, dense_directory, run_id)
    with trainer_process(config) as process:
        async with feeder(config, "one") as one, feeder(config, "two") as two:
            for end, run_id in ((one, "one"), (two, "two")):
                await end.until(Ready)
                evict(tmp_path, run_id, "by hand")
                refused = await end.until(Evicted)
                assert isinstance(refused, Evicted)
                assert refused.reason.startswith("by hand")
        assert await ended(process) == EVICTED


async def test_the_next_owner_of_a_place_finds_nothing_of_the_former(dense_directory: Path, tmp_path: Path) -> None:
    """Nor does a run of the same name, once the former's directory was deleted: as if it had been there alone."""
    alone = tmp_path / "alone"
    configure(alone, dense_directory, "next", steps=3, learning_rate=3e-4)
    with trainer_process(trainer(alone, dense_directory, 1)) as process:
        async with feeder(trainer(alone, dense_directory, 1), "next") as end:
            await train_to_the_end(end, "next", 3)
        assert await ended(process) == 0
    shared = tmp_path / "shared"
    config = trainer(shared, dense_directory, 1, stay=True)
    with trainer_process(config) as process:
        for former in ("former", "next"):
            configure(shared, dense_directory, former, learning_rate=0.1, lora={"rank": 4})
            async with feeder(config, former) as end:
                await end.until(Ready, next_step=1)
                await end.train(make_batch(2, run_id=former), make_batch(1, run_id=former))
                await until_trained(shared, former, 1)
                (shared / f"run_{former}").rename(shared / f"deleted_{former}")
                gone = await end.until(Evicted)
                assert isinstance(gone, Evicted)
                assert f"directory {shared / f'run_{former}'} was deleted" in gone.reason
        configure(shared, dense_directory, "next", steps=3, learning_rate=3e-4)
        async with feeder(config, "next") as end:
            await train_to_the_end(end, "next", 3)
        send_signal(process, signal.SIGTERM)
        assert await ended(process) == 143, log_path(config).read_text()
    assert not (shared / "run_former").exists()
    assert [line["step"] for line in metrics_lines(shared) if line["run_id"] == "next"] == [1, 2, 3]
    for step in (0, 3):
        expected, found = adapter(alone, "next", step), adapter(shared, "next", step)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


async def test_full_weights_of_one_run_after_another_begin_with_the_model_as_given(
    dense_directory: Path, tmp_path: Path
) -> None:
    config = trainer(tmp_path, dense_directory, 1)
    for run_id, lora in (("full", None), ("adapter", {"rank": 2}), ("again", None)):
        configure(tmp_path, dense_directory, run_id, steps=1, lora=lora, learning_rate=0.1)
    base = load_file(dense_directory / "model.safetensors")
    with trainer_process(config) as process:
        async with AsyncExitStack() as stack:
            ends = []
            for name in ("full", "adapter", "again"):
                ends.append(await stack.enter_async_context(feeder(config, name)))
                await ends[-1].until(Waiting if len(ends) > 1 else Ready)  # their order is that of their turns
            for end, run_id in zip(ends, ("full", "adapter", "again"), strict=True):
                if end.ready is None:
                    await end.until(Ready)
                await end.train(make_batch(1, run_id=run_id))
                await end.until(Acknowledged, durable=1)
                await end.link.close()
        assert await ended(process) == 0, log_path(config).read_text()
    for run_id in ("full", "again"):
        weights = [load_file(tmp_path / f"run_{run_id}/broadcast/step_{step}/model.safetensors") for step in (0, 1)]
        assert all(torch.equal(weights[0][name], base[name]) for name in base)
        assert any(not torch.equal(weights[1][name], base[name]) for name in base)


async def test_many_runs_need_adapters_that_fit(dense_directory: Path, tmp_path: Path) -> None:
    config = trainer(tmp_path, dense_directory, 2, max_lora_rank=4, allowed_imports=["no_such_module:loss"])
    refusals: dict[str, tuple[dict[str, Any], str]] = {
        "full": ({"lora": None}, "full weights are trained by a trainer with max_runs = 1"),
        "wide": ({"lora": {"rank": 8}}, "this trainer takes ranks up to max_lora_rank = 4"),
        "loss": (
            {"loss": {"kind": "no_such_module:loss"}},
            "training.loss.kind = 'no_such_module:loss' cannot be used",
        ),
        "stranger": (
            {"loss": {"kind": "antigravity:loss"}},
            "add 'antigravity:loss' there",
        ),
    }
    for run_id, (training, _) in refusals.items():
        configure(tmp_path, dense_directory, run_id, **training)
    with trainer_process(config):
        for run_id, (_, reason) in refusals.items():
            async with feeder(config, run_id) as end:
                refused = await end.until(Evicted)
                assert isinstance(refused, Evicted)
                assert reason in refused.reason
            assert reason in (tmp_path / f"run_{run_id}" / "control" / "config_validation_error.txt").read_text()


async def test_a_killed_trainer_goes_on_with_all_its_runs(dense_directory: Path, tmp_path: Path) -> None:
    config = trainer(tmp_path, dense_directory, 3)
    runs = ("one", "two", "three")
    for run_id in runs:
        configure(tmp_path, dense_directory, run_id)
    for life in range(2):
        with trainer_process(config.model_copy(update={"resume": life > 0})) as process:
            async with AsyncExitStack() as stack:
                ends = {run_id: await stack.enter_async_context(feeder(config, run_id)) for run_id in runs}
                if life == 0:
                    for steps, (run_id, end) in enumerate(ends.items(), 1):
                        await end.until(Ready, next_step=1)
                        await end.train(*(make_batch(step, run_id=run_id) for step in range(1, steps + 1)))
                        await until_trained(tmp_path, run_id, steps)
                    for run_id in ("two", "three"):
                        path = tmp_path / "trainer" / run_id / "checkpoints" / "step_2" / "STABLE"
                        await until(path.exists, "the checkpoint, which is written meanwhile", DEADLINE_SECONDS)
                    send_signal(process, signal.SIGKILL)
                    continue
                async with asyncio.TaskGroup() as tasks:
                    for run_id, end in ends.items():
                        tasks.create_task(train_to_the_end(end, run_id, 4))
                assert [end.ready.next_step for end in ends.values() if end.ready is not None] == [1, 3, 3]
            assert await ended(process) == 0, log_path(config).read_text()
    for run_id in runs:
        assert [line["step"] for line in metrics_lines(tmp_path) if line["run_id"] == run_id] == [1, 2, 3, 4]
