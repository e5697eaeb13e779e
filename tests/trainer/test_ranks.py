"""Two real ranks under torch's agent: the same results as one, a polite end, and no half-dead group."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from counterpoint.trainer import ranks
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.loop import EVICTED
from counterpoint.trainer.ranks import Ranks, _buckets
from counterpoint.trainer.runs.manager import HookError
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.messages import Acknowledged, Evicted, Ready
from counterpoint.transport.process.launch import descendants
from counterpoint.transport.process.notify import NotifySocket
from tests.support.polling import DEADLINE_SECONDS, until
from tests.trainer.conftest import make_batch, make_run_config
from tests.trainer.forked_ranks import launch
from tests.trainer.lone_run import make_lone_run
from tests.trainer.orchestrator_end import (
    ended,
    feeder,
    log_path,
    metrics_lines,
    send_signal,
    trainer_process,
    write_run,
)

pytestmark = pytest.mark.slow


async def until_gone(pids: list[int]) -> None:
    """Until all of these processes have ended."""
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), f"the end of {pids}")


def process_of_rank(pids: list[int], rank: int) -> int:
    """The one of `pids` that was started as `rank`."""
    variable = f"RANK={rank}".encode()
    return next(pid for pid in pids if variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def mapped_by(pid: int) -> str:
    """The files in a process's memory."""
    return Path(f"/proc/{pid}/maps").read_text()


def listeners(pids: list[int]) -> set[str]:
    """The addresses on which these processes, or their threads, accept TCP connections."""
    inodes: set[str] = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                inodes.add(os.readlink(descriptor))
    addresses = set()
    for family, width in (("tcp", 4), ("tcp6", 16)):
        for line in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in inodes:
                words = bytes.fromhex(local.partition(":")[0])  # 32 bits each, in the machine's order
                packed = b"".join(words[start : start + 4][::-1] for start in range(0, width, 4))
                addresses.add(str(ipaddress.ip_address(packed)))
    return addresses


async def test_two_ranks_train_as_one_and_stop_politely(moe_directory: Path, tmp_path: Path) -> None:
    # AdamW divides by the gradient's size: where that is near zero, the order of a sum moves a weight by a share of the rate.
    training: dict[str, Any] = {"steps": 9, "checkpoint_interval": 9, "learning_rate": 3e-4}
    write_run(make_run_config(tmp_path, moe_directory, **training))
    config = TrainerConfig(
        output_dir=tmp_path, model=str(moe_directory), processes=2, max_tokens=20, threads=1, keep_checkpoints=1
    )
    alone = make_lone_run(tmp_path / "alone", moe_directory, **training)
    expected = [alone.train(make_batch(step, routed=True)) for step in (1, 2, 3)]
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready, next_step=1)
            found = listeners([process.pid or 0, *descendants(process.pid or 0)])
            assert found, "the ranks have connections to one another"
            assert all(ipaddress.ip_address(address).is_loopback for address in found), found
            await end.train(*(make_batch(step, routed=True) for step in (1, 2, 3)))
            for rank in (0, 1):
                mapped = mapped_by(process_of_rank(descendants(process.pid or 0), rank))
                assert "/torch/" in mapped
                assert "/scipy/" not in mapped
            send_signal(process, signal.SIGTERM)
            await end.until(Acknowledged, step=3, durable=3)
        children = descendants(process.pid or 0)
        assert await ended(process) == 143, log_path(config).read_text()
        await until_gone(children)
    lines = metrics_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line, metrics in zip(lines, expected, strict=True):
        for name in (
            "loss",
            "entropy",
            "mismatch_kl",
            "grad_norm",
            "importance_ratio/max",
            "loss/guess",
            "replayed_share",
        ):
            assert line[name] == pytest.approx(metrics[name], abs=1e-5)
    saved = load_file(tmp_path / "trainer" / "default" / "checkpoints" / "step_3" / "state.safetensors")
    for name, weight in alone.weights().items():
        torch.testing.assert_close(saved[f"master.{name}"], weight, rtol=0, atol=1e-5)


async def test_a_poisoned_batch_ends_both_ranks_and_a_dead_rank_ends_the_trainer(
    dense_directory: Path, tmp_path: Path
) -> None:
    write_run(make_run_config(tmp_path, dense_directory, steps=9, checkpoint_interval=1))
    config = TrainerConfig(output_dir=tmp_path, model=str(dense_directory), processes=2, threads=1, keep_checkpoints=1)
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready, next_step=1)
            await end.train(make_batch(1))
            await end.until(Acknowledged, durable=1)
            children = descendants(process.pid or 0)
            rank = await asyncio.to_thread(process_of_rank, children, 1)
            os.kill(rank, signal.SIGKILL)
            assert await ended(process) == 1
        await until_gone(children)
    assert "a rank of the trainer died" in log_path(config).read_text()
    config = config.model_copy(update={"resume": True})
    with trainer_process(config) as process:
        async with feeder(config) as end:
            await end.until(Ready, next_step=2)
            bad = make_batch(2)
            bad.token_ids_T[3] = 1_000_000
            await end.send(bad)
            await end.until(Evicted)
        assert await ended(process) == EVICTED
    assert published_steps(tmp_path / "run_default" / "broadcast") == [0, 1]


def test_a_checkpoint_that_takes_long_does_not_lose_the_other_ranks_and_a_stopped_one_is_named(
    dense_directory: Path, tmp_path: Path
) -> None:
    """Longer, here, than any rank waits for another."""
    launch(2, tmp_path, str(dense_directory), module="tests.trainer.ranked_learner")
    assert sorted(path.name for path in tmp_path.glob("rank_*")) == ["rank_0", "rank_1"]
    assert (tmp_path / "silence").read_text().startswith("rank 1 of 2 did not answer within 1 s: stopped, at work")


def test_managers_of_two_ranks_take_over_the_same_state_and_call_their_hooks_together(tmp_path: Path) -> None:
    launch(2, tmp_path, module="tests.trainer.ranked_manager")
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert first == [
        ["creation", 0, "a", 20.0, 1],
        ["creation", 1, "bb", 42.0, 2],
        [[[0, "a"], [1, "bb"]], [1e-3, 1e-3]],
        ["deletion", 0, "a", 20.0, None],
        ["creation", 0, "ccc", 60.0, 3],
        [[[0, "ccc"], [1, "bb"]], [1e-3, 1e-3]],
        ["deletion", 0, "ccc", 60.0, None],
        ["deletion", 1, "bb", 42.0, None],
        ["creation", 1, "bb", 42.0, 2],
        [[[1, "bb"]], [0.25]],
    ]
    assert second[0] == [
        "refused",
        "discover_runs was called on rank 1; call it on rank 0, and synchronize_state on every rank",
    ]
    assert second[1:] == first


@pytest.fixture
def alone_in_a_group() -> Iterator[None]:
    """The process group of this process alone, with a store."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone_in_a_group")
def test_a_rank_whose_connection_was_cut_is_not_named_and_no_more_is_said_than_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if that was in a hook. Another rank's end cuts it, or its own wait does, which began later."""
    monkeypatch.setattr(ranks, "ROLL_CALL_SECONDS", 0.01)
    group = [Ranks(index, 4, torch.device("cpu"), None) for index in range(4)]
    cut = RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:37000")
    late = RuntimeError(
        "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 600000ms for recv operation to complete"
    )
    assert group[1].silence(ValueError("of something else")) == ""
    assert group[1].silence(HookError(f"the creation hook failed: {cut!r}")) == ""
    said = "not answer within 0.01 s: stopped, at work for longer than trainer.rank_silence_seconds, or waiting since later; "
    advice = "raise that if rows, updates or loading take so long"
    assert group[0].silence(late) == f"ranks 2, 3 of 4 did {said}{advice}"
    assert group[2].silence(late) == f"rank 3 of 4 did {said}{advice}"


def test_gradients_travel_in_few_whole_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.trainer.ranks._BUCKET_ELEMENTS", 10)
    tensors = [torch.full((size,), float(index)) for index, size in enumerate((4, 6, 1, 30, 2))]
    buckets = list(_buckets(tensors))
    assert [[tensor.numel() for tensor in bucket] for bucket in buckets] == [[4, 6], [1], [30], [2]]


RUN_TRAINER = """
import sys
from counterpoint.transport.process.notify import notify_ready
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.launch import run
sys.exit(run(TrainerConfig.model_validate_json(sys.argv[1]), notify_ready))
"""


def test_the_first_ranks_heart_is_heard(moe_directory: Path, tmp_path: Path) -> None:
    config = TrainerConfig(output_dir=tmp_path, model=str(moe_directory), processes=2, threads=1, stay=True)
    listener = NotifySocket()
    environment = os.environ | {"NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "300000"}
    process = subprocess.Popen([sys.executable, "-c", RUN_TRAINER, config.model_dump_json()], env=environment)
    try:
        said: list[dict[str, str]] = []
        waits = {"STATUS": "waiting for a run"}
        while {"READY": "1"} not in said or {"WATCHDOG": "1"} not in said or waits not in said:
            assert select.select([listener], [], [], DEADLINE_SECONDS)[0]
            said += [message] if (message := listener.receive()) is not None else []
        assert said.count({"READY": "1"}) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_SECONDS) == 143
    finally:
        process.kill()
        process.wait()
        listener.close()
