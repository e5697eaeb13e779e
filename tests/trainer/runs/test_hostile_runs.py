"""Peers that mean harm, or are broken as if they did, on the socket of a real trainer: they cost themselves only."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport import codec
from counterpoint.transport.files.atomic import as_bytes_view
from counterpoint.transport.messages import Acknowledged, Evicted, Hello, Ready, Rejected, Waiting
from counterpoint.transport.wires.endpoint import IPC, resolve_address
from tests.support.polling import DEADLINE_SECONDS
from tests.trainer.conftest import make_batch
from tests.trainer.orchestrator_end import ended, feeder, log_path, metrics_lines, trainer_process
from tests.trainer.test_train_many import configure, trainer

pytestmark = pytest.mark.slow

STEPS = 6


@contextmanager
def dealer(config: TrainerConfig) -> Iterator[Callable[[list[bytes]], None]]:
    """Sends any frames, as a peer of its own."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 5000
        peer.connect(resolve_address(config.transport, config.output_dir))

        def send(message: list[bytes]) -> None:
            peer.send_multipart(message)

        yield send


def frames(message: Hello) -> list[bytes]:
    return [bytes(as_bytes_view(frame)) for frame in codec.encode_message(message)]


def garbage(config: TrainerConfig) -> None:
    with dealer(config) as send:
        for _ in range(300):
            send([b"\x80\x04\x95pickle", b"\xc1" * 50])
            send([b"BATCH", b"\xdd\xff\xff\xff\xff"])
            send([b""])


def a_path_in_its_id(config: TrainerConfig) -> None:
    with dealer(config) as send:
        for run_id in ("../../etc", "run/../..", "a" * 65, ".hidden", "a\0b", "good\n"):
            send(frames(Hello(run_id, 0)))


def ten_gigabytes_claimed(config: TrainerConfig) -> None:
    """In ZMTP 3.0 by hand: a frame of which only the length is ever sent. The trainer hangs up."""
    address = resolve_address(config.transport, config.output_dir).removeprefix(IPC)
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(DEADLINE_SECONDS)
        peer.connect(address)
        peer.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        peer.sendall(b"\x04" + bytes([len(ready)]) + ready)
        peer.sendall(b"\x03" + struct.pack(">Q", 10 * 2**30) + b"BATCH")
        while peer.recv(4096):
            pass


def a_thousand_reconnects(config: TrainerConfig) -> None:
    """As fast as they come, of a run that nobody has configured and of one that waits for its batches."""
    with zmq.Context() as context:
        for number in range(1000):
            with context.socket(zmq.DEALER) as peer:
                peer.linger = 1000
                peer.connect(resolve_address(config.transport, config.output_dir))
                peer.send_multipart(frames(Hello(("nobody", "noisy")[number % 2], 0)))


def peak_address_space(pid: int) -> int:
    """In bytes; what was asked of the system, whether used or not."""
    match = re.search(r"VmPeak:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


@pytest.mark.parametrize("attack", [garbage, a_path_in_its_id, ten_gigabytes_claimed, a_thousand_reconnects])
async def test_who_means_harm_costs_itself_only(
    dense_directory: Path, tmp_path: Path, attack: Callable[[TrainerConfig], None]
) -> None:
    """A run trains all its steps meanwhile, and hears nothing but what it always hears."""
    config = trainer(tmp_path, dense_directory, 2)
    configure(tmp_path, dense_directory, "good", steps=STEPS, checkpoint_interval=99)
    configure(tmp_path, dense_directory, "noisy", steps=1)
    failures: list[BaseException] = []

    def run_attack() -> None:
        try:
            attack(config)
        except BaseException as error:
            failures.append(error)
            raise

    with trainer_process(config) as process:
        assert process.pid is not None
        async with feeder(config, "good") as good:
            await good.until(Ready, next_step=1)
            before = peak_address_space(process.pid)
            attacker = threading.Thread(target=run_attack)
            attacker.start()
            for step in range(1, STEPS):
                await good.train(make_batch(step, run_id="good"))
            await asyncio.to_thread(attacker.join, DEADLINE_SECONDS)
            assert not attacker.is_alive()
            assert not failures
            assert peak_address_space(process.pid) - before < 5 * 2**30, "it allocated what was only claimed"
            await good.train(make_batch(STEPS, run_id="good"))
            await good.until(Acknowledged, durable=STEPS)
        if attack is a_thousand_reconnects:
            async with feeder(config, "noisy") as noisy:
                await noisy.until(Ready, next_step=1)
                await noisy.train(make_batch(1, run_id="noisy"))
                await noisy.until(Acknowledged, durable=1)
        assert await ended(process) == 0, log_path(config).read_text()
    kinds = {type(message) for message in good.received}
    assert not kinds & {Rejected, Evicted, Waiting}
    assert sum(isinstance(message, Ready) for message in good.received) == 1
    assert [line["step"] for line in metrics_lines(tmp_path) if line["run_id"] == "good"] == list(range(1, STEPS + 1))
    log = log_path(config).read_text()
    assert len(log.splitlines()) < 200, "a flood fills no disk"
    assert ("refused a message from an unknown sender" in log) == (attack in (garbage, a_path_in_its_id))
    assert len(re.findall("run noisy is ready", log)) <= 1, "it was admitted once"
    assert not (tmp_path.parent / "etc").exists()
