"""A plain step boundary, for comparison: written without regard to the event loop.

Responses come as JSON does, with lists of numbers and routed experts in base64; each rollout is merged in a thread of
`asyncio.gather`; records go through `json`; the batch is one msgpack message with its blobs inside, encoded on the loop and
given to ZMQ to copy, and the same bytes are written to a file as the durable record. It ends with the same samples as
`orchestrator/step/boundary.py` from the same rollouts, and only benchmarks use it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq
import zmq.asyncio

from counterpoint.transport.records import Rollout, RoutingArray

_DISTINCT = 8

Observer = Callable[[str], AbstractContextManager[None]]
"""A context manager around each phase, given its name."""

Response = dict[str, Any]
"""One model call as a JSON client gives it."""


@dataclass(frozen=True, slots=True)
class PlainRollout:
    """One rollout's responses, and the environment's result."""

    rollout_id: str
    environment: str
    reward: float
    advantage: float
    responses: list[Response]


def as_received(rollouts: Sequence[Rollout], resent: bool) -> list[PlainRollout]:
    """Returns the rollouts that train, as the plain path receives them.

    With `resent`, each turn has the routing of its whole prompt, as the reference system's servers send it; else only the new
    rows. Whole prompts are many times the bytes that are used. To fit the memory, only `_DISTINCT` rollouts have routing of their
    own, and the others share it; they must be of one shape.
    """
    trained = [rollout for rollout in rollouts if rollout.error is None]
    routing = [_routing(rollout, resent) for rollout in (trained[:_DISTINCT] if resent else trained)]
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
                    "routed_experts": routed,
                }
                for turn, routed in zip(rollout.turns, routing[index % len(routing)], strict=True)
            ],
        )
        for index, rollout in enumerate(trained)
    ]


def _routing(rollout: Rollout, resent: bool) -> list[dict[str, Any]]:
    """Returns the routing of every turn in base64: all rows from the first token on, or the new ones."""
    sent = []
    rows: list[RoutingArray] = []
    for turn in rollout.turns:
        assert turn.routed_experts is not None
        rows.append(turn.routed_experts)
        array = np.concatenate(rows) if resent else turn.routed_experts
        data = base64.b64encode(array.tobytes()).decode()
        start = 0 if resent else turn.routed_experts_start
        sent.append({"data": data, "shape": array.shape, "dtype": array.dtype.name, "start": start})
    return sent


async def take(step: int, rollouts: Sequence[PlainRollout], file: Path, address: str, observe: Observer) -> None:
    """Runs one step boundary, until the consumer has read the message."""
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
    """Merges a rollout whose prompts each extend the last into one sample."""
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    chunks = []
    held = 0
    for response in rollout.responses:
        prompt, completion = response["prompt_ids"], response["completion_ids"]
        if prompt[: len(tokens)] != tokens:
            raise ValueError(f"{rollout.rollout_id}: the plain path knows only prompts that extend the last")
        new = len(prompt) - len(tokens)
        mask += [0] * new + [1] * len(completion)
        logprobs += [0.0] * new + response["logprobs"]
        tokens = prompt + completion
        routed = response["routed_experts"]
        rows = np.frombuffer(base64.b64decode(routed["data"]), dtype=routed["dtype"]).reshape(routed["shape"])
        chunks.append(rows[held - routed["start"] :])
        held = routed["start"] + len(rows)
    return {
        "rollout_id": rollout.rollout_id,
        "environment": rollout.environment,
        "reward": rollout.reward,
        "token_ids": tokens,
        "loss_mask": mask,
        "logprobs": logprobs,
        "advantages": [rollout.advantage * value for value in mask],
        "routed_experts": np.concatenate(chunks).tobytes(),
    }


def _write(file: Path, message: bytes) -> None:
    with file.open("wb") as opened:
        opened.write(message)
        opened.flush()
        os.fsync(opened.fileno())
