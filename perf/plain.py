"""The plain path, for comparison: a step boundary written the way one writes it first.

Responses come as JSON does, with lists of numbers and routed experts in base64; each rollout is merged in a thread of
`asyncio.gather`; records go through `json`; the batch is one msgpack message with its blobs inside, encoded on the loop and
given to ZMQ to copy, and the same bytes are written to a file as the durable record. It does the same work as
`orchestrator/step.py` on the same rollouts, and none of it is used by anything but benchmarks.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq
import zmq.asyncio

from cluster.process import guarded
from perf.consumer import exclusive_or
from transport.records import Rollout

_STOP_SECONDS = 10.0

Observer = Callable[[str], AbstractContextManager[None]]
"""Entered around each phase with its name."""

Response = dict[str, Any]
"""One model call as a JSON client gives it."""


@dataclass(frozen=True, slots=True)
class PlainRollout:
    """One rollout's responses, and what the environment made of them."""

    rollout_id: str
    environment: str
    reward: float
    advantage: float
    responses: list[Response]


def as_received(rollouts: Sequence[Rollout]) -> list[PlainRollout]:
    """The rollouts that train, as the plain path would have received them."""
    return [
        PlainRollout(
            rollout.rollout_id,
            rollout.environment,
            rollout.reward or 0.0,
            rollout.advantage,
            [
                {
                    "prompt_ids": turn.prompt_ids.tolist(),
                    "completion_ids": turn.completion_ids.tolist(),
                    "logprobs": turn.log_probabilities.tolist(),
                    "routed_experts": None
                    if turn.routed_experts is None
                    else {
                        "data": base64.b64encode(turn.routed_experts.tobytes()).decode(),
                        "shape": turn.routed_experts.shape,
                        "dtype": turn.routed_experts.dtype.name,
                    },
                }
                for turn in rollout.turns
            ],
        )
        for rollout in rollouts
        if rollout.error is None
    ]


async def take(step: int, rollouts: Sequence[PlainRollout], file: Path, address: str, observe: Observer) -> None:
    """One step boundary, until the consumer has read the message."""
    with observe("merge"):
        samples = await asyncio.gather(*(asyncio.to_thread(merge, rollout) for rollout in rollouts))
    with observe("records"):
        records = [{"rollout_id": r.rollout_id, "reward": r.reward, "turns": len(r.responses)} for r in rollouts]
        await asyncio.to_thread(file.with_suffix(".jsonl").write_text, json.dumps(records))
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.REQ)
    socket.connect(address)
    try:
        with observe("encode and send"):
            message = msgpack.packb({"step": step, "samples": samples})
            await socket.send(message)
        with observe("commit"):
            await asyncio.to_thread(_write, file, message)
        with observe("delivery"):
            await socket.recv()
    finally:
        socket.close(linger=0)
        context.term()


def merge(rollout: PlainRollout) -> dict[str, Any]:
    """One sample of a rollout whose prompts each extend the last."""
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    chunks = []
    for response in rollout.responses:
        prompt, completion = response["prompt_ids"], response["completion_ids"]
        if prompt[: len(tokens)] != tokens:
            raise ValueError(f"{rollout.rollout_id}: the plain path knows only prompts that extend the last")
        new = len(prompt) - len(tokens)
        mask += [0] * new + [1] * len(completion)
        logprobs += [0.0] * new + response["logprobs"]
        tokens = prompt + completion
        if (routed := response["routed_experts"]) is not None:
            data = np.frombuffer(base64.b64decode(routed["data"]), dtype=routed["dtype"])
            chunks.append(data.reshape(routed["shape"]))
    return {
        "rollout_id": rollout.rollout_id,
        "environment": rollout.environment,
        "reward": rollout.reward,
        "token_ids": tokens,
        "loss_mask": mask,
        "logprobs": logprobs,
        "advantages": [rollout.advantage * value for value in mask],
        "routed_experts": np.concatenate(chunks).tobytes() if chunks else b"",
    }


def _write(file: Path, message: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(message)
        opened.flush()
        os.fsync(opened.fileno())


@contextmanager
def plain_consumer(address: str) -> Iterator[None]:
    """A process that takes messages at `address`, reads every byte and answers each."""
    command = guarded([sys.executable, "-P", "-m", __name__, address])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the consumer did not start; it exited with {process.wait(_STOP_SECONDS)}")
        yield
    finally:
        process.terminate()
        process.wait(_STOP_SECONDS)
        process.stdout.close()


def serve(address: str) -> None:
    """Until it is killed."""
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.REP)
    socket.bind(address)
    print("ready", flush=True)
    while True:
        exclusive_or(socket.recv(copy=False).buffer)
        socket.send(b"")


if __name__ == "__main__":
    serve(sys.argv[1])
