"""What the processes that train one step together have of one another: their places, and their communication.

Every rank holds the whole model, or a slice of it (`counterpoint/trainer/model/sharding.py`), and trains its share of each step's
micro-batches, whole or a stretch of their tokens (`counterpoint/trainer/model/context.py`); gradients and metric sums are added
over the ranks, so every rank then takes the same step. Rank 0 owns the wire, the disk and all decisions; the others follow its
commands, which are bytes (msgpack and the wire's own frames, never pickled objects). With one rank nothing here
communicates. Collective calls on tensors use NCCL on CUDA and gloo on a CPU; commands always use gloo. A job starts
the ranks on its nodes (`counterpoint/job/workers.py`), `counterpoint/trainer/launch.py` those of a trainer alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.faults import has_lost_ranks, has_waited_in_vain
from counterpoint.trainer.model.context import ContextGroup
from counterpoint.trainer.model.exchange import ExpertGroup
from counterpoint.trainer.model.experts import form_groups

HEARTBEAT_SECONDS = 30.0
"""Rank 0 sends a command at least so often, so only a step's own work counts for `rank_silence_seconds`."""

ROLL_CALL_SECONDS = 10.0
"""How long a rank that timed out waits for the others to report."""

_ROLL_CALL = "counterpoint/roll_call"
"""Keys in the process group's store."""

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
    context: ContextGroup | None = None
    """The ranks that compute each row together with this one; None if it computes rows alone."""
    experts: ExpertGroup | None = None
    """The ranks that divide the experts with this one; None if it has all."""

    @property
    def row(self) -> int:
        """Which of the rows that are trained at once is this rank's."""
        return self.index if self.context is None else self.index // self.context.size

    @property
    def rows(self) -> int:
        """How many rows are trained at once."""
        return self.count if self.context is None else self.count // self.context.size

    @property
    def is_first_of_row(self) -> bool:
        """Whether this rank is the first of those that share its row: all of them compute the same sums, and its are counted."""
        return self.context is None or self.context.index == 0

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

    def send(self, rank: int, data: bytes) -> None:
        """Sends bytes, at least one, to one rank, which calls `receive` with their number."""
        dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank, group=self.commands)

    def receive(self, size: int) -> bytes:
        """Returns what rank 0 sends."""
        data = torch.empty(size, dtype=torch.uint8)
        dist.recv(data, 0, group=self.commands)
        return data.numpy().tobytes()

    def add(self, tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Adds each tensor over the ranks of `group`, or all, in place; shapes, dtypes and order are the same on every rank."""
        if self.count == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=group)
            for tensor, summed in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(summed.view_as(tensor))

    def add_rows(self, tensors: Sequence[Tensor]) -> None:
        """Adds each tensor over the rows: of ranks that share a row, which have the same, one counts. In place, on all ranks."""
        if not self.is_first_of_row:
            for tensor in tensors:
                tensor.zero_()
        self.add(tensors)

    def faults(self, own: str | None, *, of_row: bool = False) -> list[str]:
        """Returns the faults of all ranks, in the same order on every rank; `own` is this rank's, None if it has none.

        `of_row`: of the ranks that share this one's row.
        """
        if self.count == 1:
            return [own] if own is not None else []
        group = self.context.commands if of_row and self.context is not None else self.commands
        data = torch.zeros(_FAULT_BYTES, dtype=torch.uint8)
        if own is not None:
            text = (own or "?").encode(errors="replace")[:_FAULT_BYTES]
            data[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        gathered = [torch.empty_like(data) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, data, group=group)
        texts = (each.numpy().tobytes().rstrip(b"\0").decode(errors="replace") for each in gathered)
        return [text for text in texts if text]

    def silence(self, error: Exception) -> str:
        """Returns who is silent, for a person, after an error on this rank; empty unless it has waited for others in vain.

        A rank that has lost others, in whatever way, says that it is there, by the process group's store, which no rank holds.
        """
        if self.count == 1 or not has_lost_ranks(error):
            return ""
        waited = has_waited_in_vain(error)
        keys = [f"{_ROLL_CALL}/{rank}" for rank in range(self.count)]
        store = dist.distributed_c10d._get_default_store()
        try:
            store.set(keys[self.index], "")
            if not waited:
                return ""
            with suppress(dist.DistStoreError):
                store.wait(keys, timedelta(seconds=ROLL_CALL_SECONDS))
            silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        except dist.DistError as lost:
            gone = f"rank {self.index} of {self.count} has waited in vain for others, and their store is gone: {lost}"
            return gone if waited else ""
        if not silent:
            return (
                f"all {self.count} ranks answer: one kept others waiting for longer than trainer.rank_silence_seconds"
            )
        return (
            f"rank{'s' * (len(silent) > 1)} {', '.join(silent)} of {self.count} did not answer within {ROLL_CALL_SECONDS:g} s: "
            "stopped, at work for longer than trainer.rank_silence_seconds, or waiting since later; "
            "raise that if rows, updates or loading take so long"
        )

    def maximum(self, tensor: Tensor) -> None:
        """Takes the elementwise maximum over all ranks, in place."""
        if self.count > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)

    def agree(self, flags: Tensor) -> None:
        """Does the same to a tensor on the CPU, without waiting for the accelerator."""
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.commands)

    def agree_on_row(self, flags: Tensor) -> None:
        """Does so over the ranks that share this one's row."""
        assert self.context is not None
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.context.commands)

    def norm(self, own: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
        """Returns the 2-norm of a vector of which each rank of `group`, or of all, has a slice, from the norms of the slices.

        It is alike on every rank.
        """
        if self.count == 1:
            return own
        squared = own.double().square()
        dist.all_reduce(squared, group=group)
        return squared.sqrt().to(own.dtype)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(held.numel() for held in bucket) + tensor.numel() > _BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def is_follower() -> bool:
    """Returns whether this process is a rank other than 0, which has nothing of its own to bring to an end."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] != "0"


@contextmanager
def join(config: TrainerConfig, device: torch.device) -> Iterator[Ranks]:
    """Joins `config.ranks` ranks; leaves the process group at the end."""
    if config.ranks == 1:
        yield Ranks(0, 1, device, None)
        return
    timeout = timedelta(seconds=config.rank_silence_seconds)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    try:
        commands = dist.new_group(backend="gloo", timeout=timeout)
        experts = form_groups(config.expert_parallel, device, timeout)
        context = _context(config.context_parallel, timeout)
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, commands, context, experts)
    finally:
        dist.destroy_process_group()


def _context(size: int, timeout: timedelta) -> ContextGroup | None:
    """Makes the groups of neighbouring ranks that share rows, on every rank; returns this rank's."""
    if size == 1:
        return None
    ranks = range(dist.get_world_size())
    members = [list(ranks[first : first + size]) for first in ranks[::size]]
    groups = [dist.new_group(row, timeout=timeout) for row in members]
    commands = [dist.new_group(row, timeout=timeout, backend="gloo") for row in members]
    place, index = divmod(dist.get_rank(), size)
    return ContextGroup(groups[place], index, size, commands[place])
