"""Merges rollouts in a process instead of a thread (`use_process_pool`): no shared GIL, but arrays are copied both ways.

Requests and answers are frames of raw arrays over pipes, no pickle. The process ends when its standard input closes, so it
cannot outlive the daemon. It ignores Ctrl-C and SIGTERM, which make the daemon drain and may reach both.
"""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from subprocess import PIPE
from typing import Any

import numpy as np

from counterpoint.orchestrator.rollouts.rollout_file import framed, frames, parse_rollouts, rollout_buffers
from counterpoint.orchestrator.step.boundary import merge_all
from counterpoint.run.loop_health.threads import in_thread
from counterpoint.run.loop_health.watchdog import awaiting
from counterpoint.transport.arrays import AnyArray
from counterpoint.transport.files.atomic import Buffer, as_bytes_view, write_buffers
from counterpoint.transport.process.child import Child
from counterpoint.transport.records import Rollout, Sample

_LENGTH = struct.Struct("<Q")
_START_SECONDS = 60.0
_STOP_SECONDS = 5.0


class MergeProcess:
    """The daemon's end: an asynchronous context manager, which starts the process on entry. Calls run one after the other."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> MergeProcess:
        command = [sys.executable, "-P", "-m", __name__]
        self._process = await in_thread(Child, "the merge process", command, stdin=PIPE, stdout=PIPE)
        with awaiting("the merge process to start", f"pid {self._process.pid}"):
            async with asyncio.timeout(_START_SECONDS):
                await self([])
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await in_thread(self._stop)

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Sample]:
        """Returns the samples of `rollouts`, in order. Raises `RuntimeError` if the process has died."""
        async with self._turn:
            return await in_thread(self._exchange, rollouts)

    def _exchange(self, rollouts: Sequence[Rollout]) -> list[Sample]:
        try:
            _send(self._process.stdin.fileno(), [buffer for rollout in rollouts for buffer in rollout_buffers(rollout)])
            answer = _receive(self._process.stdout.fileno())
        except BrokenPipeError:
            answer = None
        if answer is None:
            raise RuntimeError(
                f"the merge process (pid {self._process.pid}) died with exit code {self._process.wait()}"
            )
        return [_sample(header, arrays) for header, arrays in frames(answer)]

    def _stop(self) -> None:
        self._process.stdin.close()
        with self._process, suppress(TimeoutError):
            self._process.wait(_STOP_SECONDS)


def serve(requests: int, answers: int) -> None:
    """Runs in the process: answers requests from one file descriptor on another until the first is closed."""
    while (request := _receive(requests)) is not None:
        samples = merge_all(parse_rollouts(request))
        _send(answers, [buffer for sample in samples for buffer in _sample_buffers(sample)])


def _sample_buffers(sample: Sample) -> list[bytes | memoryview]:
    header = {
        "rollout_id": sample.rollout_id,
        "environment": sample.environment,
        "policy_version": sample.policy_version,
        "reward": sample.reward,
        "temperature": sample.temperature,
        "turn_rewards": sample.turn_rewards,
        "chunks": len(sample.routed_experts),
    }
    # One chunk: arrays are copied anyway, and the number of arrays in a frame is limited.
    routing = {"routed_experts": np.concatenate(sample.routed_experts)} if sample.routed_experts else {}
    return framed(header, sample.columns | routing)


def _sample(header: dict[str, Any], arrays: dict[str, AnyArray]) -> Sample:
    routed_experts = (arrays.pop("routed_experts"),) if header.pop("chunks") else ()
    header["turn_rewards"] = tuple(map(tuple, header["turn_rewards"]))
    return Sample(**header, routed_experts=routed_experts, columns=arrays)


def _send(descriptor: int, buffers: Sequence[Buffer]) -> None:
    write_buffers(descriptor, [_LENGTH.pack(sum(as_bytes_view(buffer).nbytes for buffer in buffers)), *buffers])


def _receive(descriptor: int) -> memoryview | None:
    """Returns the next message, or None when the other end was closed."""
    head = _read(descriptor, _LENGTH.size)
    return None if head is None else _read(descriptor, _LENGTH.unpack(head)[0])


def _read(descriptor: int, length: int) -> memoryview | None:
    data = as_bytes_view(np.empty(length, np.uint8))
    filled = 0
    while filled < length:
        count = os.readv(descriptor, [data[filled:]])
        if not count:
            return None
        filled += count
    return data


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve(sys.stdin.fileno(), sys.stdout.fileno())
