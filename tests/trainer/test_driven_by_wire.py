"""A run that is driven over the wire has the weights of one that is driven in the trainer's process, bit for bit.

Also after kills of the trainer and of the client between two contributions and their update.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from torch import Tensor

from counterpoint.run.items import AdamW, ItemHeader, Objective
from counterpoint.run.trained import TrainedRun
from counterpoint.service.journal import Journal
from counterpoint.service.runs import DrivenRun, ItemFailed
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.driven import drive
from counterpoint.transport.messages import SECONDS
from counterpoint.transport.records import Batch
from counterpoint.transport.wires.link import SharedConnection
from counterpoint.transport.wires.open import open_connection
from counterpoint.verify.report import SOUND
from counterpoint.verify.run import verify
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.trainer.conftest import make_batch
from tests.trainer.orchestrator_end import send_signal, trainer_process
from tests.trainer.test_driven import WEIGHTS, check_equal, configured, described

pytestmark = pytest.mark.slow

STEPS = 3
RANKS = (4, 8, 16, 32)
MANY = 8

VALUES = [AdamW(10.0**-step, eps=1e-12, clip=float("inf")) for step in range(1, STEPS + 1)]


def objective(step: int, part: int, times: int = 1) -> Objective:
    """A loss with weights, which returns its columns; `times` as many samples."""
    tokens = len(batch(step, part, times).token_ids_T)
    weights = np.random.default_rng(part).random(tokens).astype(np.float32)
    return Objective({"kind": "sft"}, divisor=1.0, weights=weights.tobytes(), returns=True)


def batch_of(step: int, part: int) -> int:
    return 10 * step + part


def batch(step: int, part: int, times: int) -> Batch:
    return make_batch(batch_of(step, part), (9, 17, 5, 12) * times)


@pytest.fixture(scope="module")
def native(dense_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], list[bytes]]:
    """The adapter after all steps, and the log-probabilities of each contribution."""
    found = []
    directory = tmp_path_factory.mktemp("native")
    with drive(configured(directory, dense_directory), described()) as run:
        assert run is not None
        for step in range(1, STEPS + 1):
            for part in (1, 2):
                outcome = run.contribute(make_batch(batch_of(step, part)), objective(step, part))
                found.append(outcome.columns["log_probabilities"].tobytes())
            run.update(VALUES[step - 1])
        return load_file(run.publish("last") / WEIGHTS), found


def trained() -> TrainedRun:
    return described(checkpoint_interval=1)


def serving(directory: Path, model: Path, *, resume: bool = False) -> TrainerConfig:
    return configured(directory, model, resume=resume).model_copy(update={"stay": True})


@asynccontextmanager
async def client(
    config: TrainerConfig, run: TrainedRun | None = None, connection: SharedConnection | None = None
) -> AsyncIterator[DrivenRun]:
    """The run as a new process of the client finds it."""
    described = run or trained()
    journal = Journal(config.output_dir / "loops" / described.run_id, described.run_id, 2**30)
    connection = connection or open_connection(config.transport, config.output_dir)
    driven = DrivenRun(described, config.output_dir, connection, journal)
    await driven.start()
    try:
        yield driven
    finally:
        await driven.close()


async def contribute(run: DrivenRun, step: int, times: int = 1) -> list[bytes]:
    answers = await asyncio.gather(
        *(run.forward_backward(batch(step, part, times), objective(step, part, times)) for part in (1, 2))
    )
    return [each.columns["log_probabilities"].tobytes() for each in answers]


async def test_weights_and_results_are_those_of_a_native_run(
    dense_directory: Path, tmp_path: Path, native: tuple[dict[str, Tensor], list[bytes]]
) -> None:
    weights, columns = native
    config, found = serving(tmp_path, dense_directory), []
    async with asyncio.timeout(DEADLINE_SECONDS):
        with trainer_process(config):
            async with client(config) as run:
                for step in range(1, STEPS + 1):
                    found += await contribute(run, step)
                    answer = await run.update(VALUES[step - 1])
                    assert answer.step == step
                    assert answer.metrics[SECONDS] > 0
                check_equal(load_file(await run.publish("last") / WEIGHTS), weights)
                assert await run.save() == STEPS
                with pytest.raises(ItemFailed, match="no contribution") as refused:
                    await run.update(VALUES[0])
                assert refused.value.by_asker

                await asyncio.gather(*await pipelined(run))
                check_equal(load_file(await run.publish("after") / WEIGHTS), weights)
    assert found == columns
    report = verify(config.output_dir / "run_one")
    assert (report.code, report.unit) == (SOUND, "item"), report.text()
    assert report.checked["publications"] == 2
    assert report.checked["checkpoints of the trainer"] >= 1


async def pipelined(run: DrivenRun) -> list[asyncio.Task[None]]:
    """A contribution that is refused, one that is not, and their update, all asked for before any is answered."""
    numbers = [
        await run.begin(ItemHeader(objective=Objective({"kind": "none"})), make_batch(1)),
        await run.begin(ItemHeader(objective=objective(1, 1)), make_batch(batch_of(1, 1))),
        await run.begin(ItemHeader(updates=True, values=VALUES[0])),
        await run.begin(ItemHeader(updates=True, values=VALUES[0])),
    ]

    async def answer(number: int, said: str | None) -> None:
        answered = await run.answer_to(number)
        assert (answered.fault == "") == (said is None), answered
        assert said is None or said in answered.text

    expected = ["kind", None, "has failed", "no contribution"]
    return [asyncio.create_task(answer(*each)) for each in zip(numbers, expected, strict=True)]


async def test_nothing_counts_twice_after_kills_before_an_update(
    dense_directory: Path, tmp_path: Path, native: tuple[dict[str, Tensor], list[bytes]]
) -> None:
    weights, columns = native
    config, found = serving(tmp_path, dense_directory), []
    checkpoint = tmp_path / "trainer" / "one" / "checkpoints" / "step_1" / "STABLE"
    async with asyncio.timeout(DEADLINE_SECONDS):
        with trainer_process(config) as process:
            async with client(config) as run:
                found += await contribute(run, 1)
                await run.update(VALUES[0])
                found += await contribute(run, 2)
            async with client(config) as run:  # another process of it
                await run.update(VALUES[1])
                found += await contribute(run, 3)
                await asyncio.to_thread(wait_until, checkpoint.exists, "a checkpoint")
                send_signal(process, signal.SIGKILL)
                await asyncio.to_thread(process.join)
                with trainer_process(serving(tmp_path, dense_directory, resume=True)):
                    await run.update(VALUES[2])
                    check_equal(load_file(await run.publish("last") / WEIGHTS), weights)
                    assert await run.save() == STEPS
    assert found == columns


def ranked(rank: int) -> TrainedRun:
    """A run of this rank, with a seed of its own."""
    lora = {"rank": rank, "target_modules": ["q_proj", "down_proj"], "seed": rank}
    table = trained().model_dump(exclude_none=True)
    return TrainedRun.model_validate(table | {"run_id": f"rank-{rank}", "training": {"lora": lora}})


async def test_four_runs_of_different_ranks_are_what_each_is_alone(dense_directory: Path, tmp_path: Path) -> None:
    """They share rows."""
    alone = {}
    for rank in RANKS:
        config = configured(tmp_path / f"alone-{rank}", dense_directory)
        with drive(config, ranked(rank)) as native:
            assert native is not None
            for step in range(1, STEPS + 1):
                for part in (1, 2):
                    native.contribute(batch(step, part, MANY), objective(step, part, MANY))
                native.update(VALUES[-1])
            alone[rank] = load_file(native.publish("last") / WEIGHTS)
    config = serving(tmp_path / "together", dense_directory).model_copy(update={"max_runs": 4})
    async with asyncio.timeout(DEADLINE_SECONDS), AsyncExitStack() as stack:
        stack.enter_context(trainer_process(config))
        connection = open_connection(config.transport, config.output_dir)
        runs = {rank: await stack.enter_async_context(client(config, ranked(rank), connection)) for rank in RANKS}
        for run in runs.values():
            await run.admitted()
        for step in range(1, STEPS + 1):
            await asyncio.gather(*(contribute(run, step, MANY) for run in runs.values()))
            await asyncio.gather(*(run.update(VALUES[-1]) for run in runs.values()))
        for rank, run in runs.items():
            found = load_file(await run.publish("last") / WEIGHTS)
            assert found.keys() == alone[rank].keys()
            assert max(float((found[name] - alone[rank][name]).abs().max()) for name in found) <= 1e-6
