"""The whole trainer in a real process, fed over the real wire: it trains, resumes exactly, stops politely, and says no."""

from __future__ import annotations

import errno
import shutil
import signal
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from counterpoint.inference.digest import digests_of
from counterpoint.orchestrator.run_directory import check_control
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.loop import EVICTED
from counterpoint.trainer.model.load import load_model, log_probabilities
from counterpoint.trainer.runs import manager
from counterpoint.trainer.train import train
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.messages import Acknowledged, Evicted, Hello, Published, Ready, Rejected, Waiting
from counterpoint.transport.process.permanent_errors import PASSING
from counterpoint.transport.wires.open import open_link, open_receiver
from tests.support.polling import DEADLINE_SECONDS, until
from tests.trainer.conftest import make_batch, make_run_config
from tests.trainer.one_process_trainer import life, write_member
from tests.trainer.orchestrator_end import (
    Feeder,
    ended,
    feeder,
    log_path,
    metrics_lines,
    read_probe,
    send_signal,
    trainer_process,
    write_run,
)

pytestmark = pytest.mark.slow


def job(output_dir: Path, model: Path, trainer: dict[str, Any] | None = None, **training: Any) -> TrainerConfig:
    """A trainer's configuration, beside a run's in its place."""
    write_run(make_run_config(output_dir, model, **training))
    return TrainerConfig(output_dir=output_dir, model=str(model), threads=1, **(trainer or {}))


def broadcast(output_dir: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(output_dir / "run_default" / "broadcast" / f"step_{version}" / "model.safetensors")


def check_probe(output_dir: Path, version: int) -> None:
    """The published weights, loaded as inference loads them, give the published probe, and their files the published digests."""
    probe = read_probe(output_dir, version)
    assert probe["version"] == version
    assert answers(output_dir, version, probe["token_ids"]) == pytest.approx(probe["log_probabilities"], abs=1e-5)
    assert probe["digests"] == digests_of(broadcast(output_dir, version))


def answers(output_dir: Path, version: int, token_ids: list[int]) -> list[float]:
    """What a published version answers to a probe of these tokens."""
    tokens = torch.tensor(token_ids)
    model = load_model(output_dir / "run_default" / "broadcast" / f"step_{version}", "float32", torch.device("cpu"))
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        values, _ = log_probabilities(model, tokens, positions, [len(tokens)], positions[:-1], tokens[1:], 1.0)
    return [float(value) for value in values]


async def test_trains_a_run_to_its_end(moe_directory: Path, tmp_path: Path) -> None:
    config = job(tmp_path, moe_directory, {"keep_broadcasts": 2}, steps=3)
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready, next_step=1)
            check_probe(tmp_path, 0)
            assert read_probe(tmp_path, 0)["previous"] is None
            await end.train(make_batch(1, routed=True), make_batch(3, routed=True), make_batch(2, routed=True))
            await end.until(Acknowledged, step=3, durable=3)
        assert [each.version for each in end.received if isinstance(each, Published)] == [1, 2, 3]
        assert await ended(process) == 0, log_path(config).read_text()
    assert published_steps(tmp_path / "run_default" / "broadcast") == [2, 3]
    check_probe(tmp_path, 3)
    probe = read_probe(tmp_path, 3)
    assert probe["previous"] == pytest.approx(answers(tmp_path, 2, probe["token_ids"]), abs=1e-5)
    assert probe["previous"] != pytest.approx(probe["log_probabilities"], abs=1e-5)
    lines = metrics_lines(tmp_path)
    assert [(line["run_id"], line["step"]) for line in lines] == [("default", 1), ("default", 2), ("default", 3)]
    assert all(line["tokens_per_second"] > 0 and line["replayed_share"] == 1.0 for line in lines)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
async def test_resumes_exactly_after_a_kill(dense_directory: Path, tmp_path: Path, lora: dict[str, int] | None) -> None:
    """Killed after step 3 with a checkpoint at 2, the second life repeats 3 and ends with the weights of an undisturbed one."""
    results = []
    for name, killed in (("undisturbed", False), ("killed", True)):
        output_dir = tmp_path / name
        config = job(output_dir, dense_directory, {"keep_broadcasts": 9}, steps=4, lora=lora)
        if killed:
            with trainer_process(config) as process:
                async with feeder(config) as end:
                    await end.until(Ready, next_step=1)
                    await end.train(make_batch(1), make_batch(2))
                    # Step 4's acknowledgement says that step 3 is published.
                    await end.train(make_batch(3), make_batch(4))
                    checkpoint = output_dir / "trainer" / "default" / "checkpoints" / "step_2" / "STABLE"
                    await until(checkpoint.exists, "the checkpoint, which is written meanwhile", DEADLINE_SECONDS)
                    send_signal(process, signal.SIGKILL)
            published = published_steps(output_dir / "run_default" / "broadcast")
            assert published[:4] == [0, 1, 2, 3]
            (output_dir / "trainer" / "default" / "checkpoints" / "step_4" / "STABLE").unlink(missing_ok=True)
            config = config.model_copy(update={"resume": True})
        with trainer_process(config) as process:
            async with feeder(config) as end:
                await end.until(Ready, next_step=3 if killed else 1)
                if killed:
                    assert published_steps(output_dir / "run_default" / "broadcast") == [0, 1, 2]
                    await end.train(make_batch(2), make_batch(3))
                else:
                    await end.train(make_batch(1), make_batch(2), make_batch(3))
                await end.train(make_batch(4))
                await end.until(Acknowledged, step=4, durable=4)
            assert await ended(process) == 0, log_path(config).read_text()
        file = "adapter_model.safetensors" if lora else "model.safetensors"
        tensors = load_file(output_dir / "run_default" / "broadcast" / "step_4" / file)
        lines = metrics_lines(output_dir)
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        results.append((tensors, [(line["loss"], line["grad_norm"]) for line in lines]))
    (first, first_metrics), (second, second_metrics) = results
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first_metrics == second_metrics


def test_a_batch_that_is_there_is_trained_without_waiting_for_a_message(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a run's end, when its orchestrator has sent all."""
    write_member(tmp_path, dense_directory, "one", steps=3)
    with life(tmp_path, dense_directory, {"one": 3}) as one:
        waits: list[float] = []
        receive = one.wire.receive

        def noting(timeout: float) -> Any:
            run = one.manager.registry.taking("one")
            if run is not None and run.progress.step + 1 in one.trainer.shared.orders[run.slot].waiting:
                waits.append(timeout)
            return receive(timeout)

        monkeypatch.setattr(one.wire, "receive", noting)
        one.until_step(one=3)
    assert waits
    assert not any(waits)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ESTALE, "Stale file handle"), PASSING),
        (OSError(errno.EMFILE, "Too many open files"), PASSING),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1),
        (OSError("no file named model.safetensors"), 2),
        (RuntimeError("a tensor of another shape"), 2),
    ],
    ids=str,
)
def test_only_what_would_happen_again_ends_a_trainer_for_good(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    """A supervisor starts it again after code 1 or 75, and not after 2."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    monkeypatch.setattr(manager, "_manager", None)
    config = TrainerConfig(output_dir=tmp_path, model=str(dense_directory))
    assert train(config, lambda: pytest.fail("it is not ready")) == code


async def test_a_stop_request_leaves_a_checkpoint(dense_directory: Path, tmp_path: Path) -> None:
    config = job(tmp_path, dense_directory, {"keep_checkpoints": 1}, steps=9, checkpoint_interval=9)
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready)
            await end.train(make_batch(1))
            send_signal(process, signal.SIGTERM)
            await end.until(Acknowledged, step=1, durable=1)
            assert await ended(process) == 143, log_path(config).read_text()
    assert published_steps(tmp_path / "trainer" / "default" / "checkpoints") == [1]
    with trainer_process(config) as process:
        assert await ended(process) == 2
    assert "--resume (in a file: resume = true)" in log_path(config).read_text()


async def test_a_finished_run_waits_for_its_orchestrator_as_long_as_that_would_wait(
    dense_directory: Path, tmp_path: Path
) -> None:
    """One that was killed before it heard of the end finds the trainer there; if none comes, the trainer is done all the same."""
    config = job(tmp_path, dense_directory, steps=1)
    orchestrator = make_run_config(tmp_path, dense_directory, steps=1)
    write_run(orchestrator.model_copy(update={"trainer_timeout_seconds": 1.0}))
    with trainer_process(config) as process:
        end = open_link(config.transport, config.output_dir)
        await end.start(Hello("default", 0))
        killed = Feeder(end)
        await killed.until(Ready, next_step=1)
        await killed.train(make_batch(1))
        await killed.until(Acknowledged, step=1, durable=1)
        assert await ended(process) == 0, log_path(config).read_text()
        await end.close()
    config = config.model_copy(update={"resume": True})
    with trainer_process(config) as process:
        assert await ended(process) == 0, log_path(config).read_text()
    write_run(orchestrator)
    with trainer_process(config) as process:
        async with feeder(config) as late:
            await late.until(Ready, next_step=2)
            await late.until(Acknowledged, durable=1)
        assert await ended(process) == 0, log_path(config).read_text()


async def test_a_finished_run_goes_on_with_more_steps(dense_directory: Path, tmp_path: Path) -> None:
    config = job(tmp_path, dense_directory, steps=1)
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready)
            await end.train(make_batch(1))
            await end.until(Acknowledged, durable=1)
        assert await ended(process) == 0
    write_run(make_run_config(tmp_path, dense_directory, steps=2))
    with trainer_process(config.model_copy(update={"resume": True})) as process:
        async with feeder(config) as end:
            await end.until(Ready, next_step=2)
            await end.train(make_batch(2))
            await end.until(Acknowledged, durable=2)
        assert await ended(process) == 0, log_path(config).read_text()
    assert [line["step"] for line in metrics_lines(tmp_path)] == [1, 2]


async def test_a_poisoned_batch_evicts_its_run(dense_directory: Path, tmp_path: Path) -> None:
    config = job(tmp_path, dense_directory)
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready)
            await end.train(make_batch(1))
            bad = make_batch(2)
            bad.token_ids_T[5] = 5_000
            await end.send(bad)
            evicted = await end.until(Evicted)
            assert isinstance(evicted, Evicted)
            assert "step 2: sample 0 (2-0), token 5: id 5000 is outside the model's vocabulary" in evicted.reason
        assert await ended(process) == EVICTED
    assert "5000" in (tmp_path / "run_default" / "control" / "evicted.txt").read_text()
    assert published_steps(tmp_path / "trainer" / "default" / "checkpoints") == [1]
    assert published_steps(tmp_path / "run_default" / "broadcast") == [0, 1]


async def test_runs_that_cannot_be_trained_are_told_why(dense_directory: Path, tmp_path: Path) -> None:
    """And may come back once they are mended, while the trainer waits."""
    config = job(tmp_path, dense_directory, lora={"rank": 2, "target_modules": ["query"]})
    file = tmp_path / "run_default" / "control" / "orch.toml"
    complaint = file.with_name("config_validation_error.txt")
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Evicted)
        assert "training.lora.target_modules = ['query']: this model has no such layer" in complaint.read_text()
        file.write_text("steps = 'many'\n")
        async with feeder(config) as end:
            await end.until(Evicted)
        assert "steps" in complaint.read_text()
        async with feeder(config, "nobody") as end:
            await end.until(Waiting, reason="its control/orch.toml is not there yet")
        write_run(make_run_config(tmp_path, dense_directory, steps=1))
        async with feeder(config) as end:
            await end.until(Ready, next_step=1)
            check_control(tmp_path / "run_default")  # with what is there, its orchestrator goes on
            await end.train(make_batch(1))
            await end.until(Acknowledged, durable=1)
        assert await ended(process) == 0, log_path(config).read_text()


async def test_batches_beyond_the_credit_are_not_hoarded(dense_directory: Path, tmp_path: Path) -> None:
    config = job(tmp_path, dense_directory, {"transport": {"credit": 2}}, steps=9)
    with trainer_process(config):
        async with feeder(config) as end:
            await end.until(Ready, credit=2)
            await end.send(make_batch(3))
            rejected = await end.until(Rejected, step=3)
            assert isinstance(rejected, Rejected)
            assert "trains step 1 next and holds 2 batches" in rejected.reason
            await end.train(make_batch(2), make_batch(1))
            await end.train(make_batch(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "/nonexistent"}, "there is no config.json"),
        ({"transport": {"address": "tcp://0.0.0.0:1"}}, "key"),
    ],
)
async def test_bad_configuration_ends_with_two(
    dense_directory: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = TrainerConfig.model_validate({"output_dir": tmp_path, "model": str(dense_directory), **change})
    with trainer_process(config) as process:
        assert await ended(process) == 2
    assert message in log_path(config).read_text()


async def test_a_place_that_another_trainer_has_is_no_bad_configuration(dense_directory: Path, tmp_path: Path) -> None:
    config = TrainerConfig.model_validate({"output_dir": tmp_path, "model": str(dense_directory)})
    with closing(open_receiver(config.transport, tmp_path)), trainer_process(config) as process:
        assert await ended(process) == PASSING
    assert "another trainer does; stop it" in log_path(config).read_text()


async def test_a_damaged_checkpoint_is_named_and_left(dense_directory: Path, tmp_path: Path) -> None:
    """It is its run's affair: the trainer stays, and takes the run again once an operator has removed what is damaged."""
    config = job(tmp_path, dense_directory, steps=2)
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready)
            await end.train(make_batch(1), make_batch(2))
            await end.until(Acknowledged, durable=2)
        assert await ended(process) == 0
    checkpoint = tmp_path / "trainer" / "default" / "checkpoints" / "step_2"
    state = checkpoint / "state.safetensors"
    state.write_bytes(state.read_bytes()[:1000])
    config = config.model_copy(update={"resume": True})
    with trainer_process(config):
        async with feeder(config) as end:
            refused = await end.until(Evicted)
        assert isinstance(refused, Evicted)
        assert "step_2 cannot be used" in refused.reason
        assert "remove that directory" in (tmp_path / "run_default/control/config_validation_error.txt").read_text()
        assert state.stat().st_size == 1000
        shutil.rmtree(checkpoint)
        write_run(make_run_config(tmp_path, dense_directory, steps=2))
        async with feeder(config) as end:
            await end.until(Ready, next_step=1)


async def test_a_damaged_checkpoint_can_be_done_without(dense_directory: Path, tmp_path: Path) -> None:
    """The trainer goes back to the one before, so the orchestrator must still have the batches that follow that one."""
    config = job(tmp_path, dense_directory, {"keep_checkpoints": 2}, steps=9, checkpoint_interval=1)
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready)
            await end.train(make_batch(1), make_batch(2), make_batch(3), make_batch(4))
            await end.until(Acknowledged, durable=3)
            send_signal(process, signal.SIGKILL)
    checkpoints = tmp_path / "trainer" / "default" / "checkpoints"
    assert published_steps(checkpoints) == [3, 4]
    shutil.rmtree(checkpoints / "step_4")
    with trainer_process(config.model_copy(update={"resume": True})):
        async with feeder(config) as end:
            await end.until(Ready, next_step=4)


async def test_a_full_disk_of_broadcasts_alone_ends_the_trainer_of_one_run(
    dense_directory: Path, tmp_path: Path
) -> None:
    """It does not evict the run, since there is no other for whose sake it would go on."""
    weights_size = (dense_directory / "model.safetensors").stat().st_size
    config = job(tmp_path, dense_directory, steps=2)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other_disk:
        (tmp_path / "run_default" / "broadcast").symlink_to(other_disk)
        with trainer_process(config, largest_file=weights_size // 2) as process:
            async with feeder(config):
                assert await ended(process) == 1
        assert f"cannot write to {tmp_path / 'run_default' / 'broadcast'}/" in log_path(config).read_text()
    assert not (tmp_path / "run_default" / "control" / "evicted.txt").exists()


async def test_a_full_disk_ends_the_trainer_with_its_last_state_intact(dense_directory: Path, tmp_path: Path) -> None:
    """The weights still fit, the checkpoint, three times their size, does not."""
    weights_size = (dense_directory / "model.safetensors").stat().st_size
    config = job(tmp_path, dense_directory, steps=2)
    with trainer_process(config, largest_file=2 * weights_size) as process:
        async with feeder(config) as end:
            await end.until(Ready)
            await end.train(make_batch(1), make_batch(2))
        assert await ended(process) == 1
    assert f"cannot write to {tmp_path}/trainer/default/checkpoints/" in log_path(config).read_text()
    assert published_steps(tmp_path / "run_default" / "broadcast") == [0, 1, 2]
    assert list((tmp_path / "trainer" / "default" / "checkpoints").iterdir()) == []
    check_probe(tmp_path, 2)
