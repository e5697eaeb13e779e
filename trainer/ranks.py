"""Starts the processes that train one step together, and communicates between them.

Every rank holds the whole model and trains its share of each step's micro-batches; gradients and metric sums are added
over the ranks, so every rank then takes the same step. Rank 0 owns the wire, the disk and all decisions; the others follow its
commands, which are bytes (msgpack and the wire's own frames, never pickled objects). With `processes = 1` nothing here
communicates. Collective calls on tensors use NCCL on CUDA and gloo on a CPU; commands always use gloo. All ranks are on this
machine, under torch's elastic agent (`cluster.elastic.ranks`), and use the loopback interface only.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from cluster.elastic.ranks import RanksProcess, alone, python_command
from cluster.notify import Heartbeat, NotifySocket
from trainer.config import TrainerConfig
from transport.files.atomic import write_atomically
from transport.process.stop_requests import StopSignals, end_at_second_request

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
"""If a rank keeps the others waiting longer than this in a collective call, all ranks end. Rank 0 sends a command at least every
`HEARTBEAT_SECONDS`, so only a step's own work counts."""

HEARTBEAT_SECONDS = 30.0

AGENT_STOP_SECONDS = 60.0
"""torch's agent itself kills ranks that have not ended 30 s after its SIGTERM."""

_FAULT_BYTES = 1024
"""Most bytes of a fault that a rank sends to the others; the wire has the same limit."""

_BUCKET_ELEMENTS = 2**24
"""Elements of a buffer in which gradients are added: 64 MiB of float32, for few calls and little memory."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank's position among the ranks, and its communication."""

    index: int
    count: int
    device: torch.device
    commands: dist.ProcessGroup | None

    def share(self, data: bytes | None) -> bytes:
        """Returns rank 0's `data` on every rank; the others pass None and wait for it."""
        if self.count == 1:
            assert data is not None
            return data
        size = torch.tensor([len(data) if data is not None else 0])
        dist.broadcast(size, src=0, group=self.commands)
        payload = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data is not None
            else torch.empty(int(size), dtype=torch.uint8)
        )
        dist.broadcast(payload, src=0, group=self.commands)
        return payload.numpy().tobytes()

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Adds each tensor over all ranks, in place; shapes, dtypes and order are the same on every rank."""
        if self.count == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat)
            for tensor, summed in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def faults(self, own: str | None) -> list[str]:
        """Returns the faults of all ranks, in the same order on every rank; `own` is this rank's, None if it has none."""
        if self.count == 1:
            return [own] if own is not None else []
        data = torch.zeros(_FAULT_BYTES, dtype=torch.uint8)
        if own is not None:
            text = (own or "?").encode(errors="replace")[:_FAULT_BYTES]
            data[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        gathered = [torch.empty_like(data) for _ in range(self.count)]
        dist.all_gather(gathered, data, group=self.commands)
        texts = (each.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for each in gathered)
        return [text for text in texts if text]

    def maximum(self, tensor: Tensor) -> None:
        """Takes the elementwise maximum over all ranks, in place."""
        if self.count > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(held.numel() for held in bucket) + tensor.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def is_rank() -> bool:
    """Returns whether torch's agent started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def join(config: TrainerConfig, device: torch.device) -> Iterator[Ranks]:
    """Joins `config.processes` ranks; leaves the process group at the end."""
    if config.processes == 1:
        yield Ranks(0, 1, device, None)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=COLLECTIVE_TIMEOUT)
    else:
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        commands = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, commands)
    finally:
        dist.destroy_process_group()


def launch(config: TrainerConfig, on_ready: Callable[[], object]) -> int:
    """Runs the trainer as `config.processes` ranks under torch's agent, until they end; returns rank 0's exit code.

    A stop signal is forwarded to rank 0 alone, which finishes its step and ends the others' loops: the agent would end them all.
    If this process dies, the agent's guardian kills everything.
    """
    directory = config.output_dir / "trainer"
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "ranks.json"
    write_atomically(file, config.model_dump_json().encode())
    socket = NotifySocket()
    environment = {
        "NOTIFY_SOCKET": socket.address,
        "OMP_NUM_THREADS": str(config.threads or 1),
        "PYTHONSAFEPATH": "1",  # as -P does, which the agent itself is started with
    }
    if (period := os.environ.get("WATCHDOG_USEC")) is not None:  # of this process, for rank 0's heartbeat
        environment["WATCHDOG_USEC"] = period
    command = python_command(module="trainer.rank_process", arguments=(str(file),))
    ranks = alone(command, config.processes, environment)
    try:
        with StopSignals(end_at_second_request) as stop:
            return _supervise(ranks, socket, stop, on_ready)
    finally:
        if ranks.poll() is None:
            ranks.terminate()
            try:
                ranks.process.wait(AGENT_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                logger.error(
                    "the ranks did not end within %.0f s of their SIGTERM; they are killed", AGENT_STOP_SECONDS
                )
        ranks.close()
        socket.close()


def _supervise(ranks: RanksProcess, socket: NotifySocket, stop: StopSignals, on_ready: Callable[[], object]) -> int:
    rank_zero: int | None = None
    forwarded = False
    ready = False
    heartbeat = Heartbeat()
    code: int | None = None
    while ranks.poll() is None:
        select.select([socket], [], [], 0.2)
        while (message := socket.receive()) is not None:
            if "MAINPID" in message:
                rank_zero = int(message["MAINPID"])
            if message.get("READY") == "1" and not ready:
                ready = True
                on_ready()
            if message.get("WATCHDOG") == "1":  # rank 0's heartbeat: this process only waits
                heartbeat.beat()
            if "EXIT_STATUS" in message:
                code = int(message["EXIT_STATUS"])
        if stop.count and not forwarded:
            forwarded = True
            if rank_zero is None:
                logger.info("stopped before the ranks had started")
                ranks.terminate()
            else:
                with suppress(ProcessLookupError):  # it has died, and the agent will notice
                    os.kill(rank_zero, signal.SIGTERM)
    if code is None and forwarded and rank_zero is None:
        return stop.exit_code
    if code is None:
        logger.error("a rank of the trainer died (%s); its last output is above", ranks.failure)
        return 1
    return code
