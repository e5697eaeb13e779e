"""The environment that the orchestrator has when the real one runs in workers. It never imports the real one's module."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from typing import Any

from counterpoint.environments.base import (
    LONGEST_ANSWER,
    EnvironmentContext,
    Example,
    Model,
    Score,
    UnavailableError,
    WorkerError,
)
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.reward import Reward
from counterpoint.environments.workers import protocol
from counterpoint.environments.workers.found import Found
from counterpoint.environments.workers.pool import WorkerPool
from counterpoint.environments.workers.protocol import Message
from counterpoint.transport.printable import shortened
from counterpoint.transport.records import Rollout, Turn

logger = logging.getLogger(__name__)

_MOST_SCORED = 10_000
_PACKED_ON_THE_LOOP = 2**18
"""Bytes of a group's turns; more are packed in a thread."""


class WorkerEnvironment:
    """`environments.base.Environment` by a pool of workers.

    A rollout is scored right after it was played, in the same worker, so `score` only returns what came with it. Rewards of
    turns, those that `score` returned there among them, are given to the model.
    """

    def __init__(self, config: EnvironmentConfig, found: Found) -> None:
        """`found` is what the environment is like, which every worker has to confirm."""
        self.group_scoring, self.fingerprint, self.weights = found.group_scoring, found.fingerprint, found.weights
        self.reward_bounds, self.needs_tool_parser = found.reward_bounds, found.needs_tool_parser
        self._config = config
        self._examples = found.examples
        self._pool = WorkerPool(config, found.examples, found.group_scoring)
        self._scored: dict[int, tuple[dict[str, Any], Score, dict[str, Any]]] = {}
        """Scores, by identity of the state: the reward and the metrics of a rollout that was played and is about to be
        scored."""

    def __len__(self) -> int:
        return self._examples

    def example(self, index: int) -> Example:
        """Returns the number of an example: its worker makes it."""
        return Example(index, "")

    async def start(self, context: EnvironmentContext) -> None:
        """Starts the workers. Raises `ValueError` when none can be started."""
        await self._pool.start(context)

    async def close(self) -> None:
        """Ends the workers."""
        await self._pool.close()

    @property
    def workers(self) -> int:
        """The number of workers, ready or not."""
        return self._config.workers

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics of the workers since the last call."""
        return self._pool.take_metrics()

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """Plays the example in a worker. Raises `WorkerError`: what the environment raised there, or how the worker ended."""
        record: Rollout | None = getattr(model, "rollout", None)
        identity = ["", 0, self._config.name, example.index] if record is None else protocol.identity_of(record)
        # Without the rollout's names, which a score may read, it is scored by a message of its own.
        scored = not self.group_scoring and record is not None
        template = getattr(model.chat, "template_kwargs", None)
        variables = json.dumps(dict(template), sort_keys=True) if template else "{}"
        sampling = model.sampling.model_dump()

        def message(number: int) -> Message:
            return [protocol.PLAY, number, example.index, identity, sampling, variables, scored]

        session, done = await self._pool.play(model, self._deadline(), message)
        if record is not None and done[6] is not None:
            record.answer = shortened(done[6], LONGEST_ANSWER)
        _raise_error(done)
        result = session.result(done)
        state.clear()
        state.update(result.state)
        if scored:
            if len(self._scored) >= _MOST_SCORED:  # played by somebody who does not score
                del self._scored[next(iter(self._scored))]
            self._scored[id(state)] = state, _rewards(done, 1)[0], result.metrics

    async def score(self, example: Example, rollout: Rollout) -> Score:
        """Returns the reward that came with the rollout; asks a worker for any other rollout's."""
        known = self._scored.pop(id(rollout.state), None)
        if known is not None:
            _, reward, metrics = known
            rollout.metrics.update(metrics)
            return reward
        return (await self._score(example, [rollout], grouped=False))[0]

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Has a worker score the group."""
        return await self._score(example, rollouts, grouped=True)

    async def _score(self, example: Example, rollouts: Sequence[Rollout], *, grouped: bool) -> list[Score]:
        packed = await _pack(rollouts)

        def message(number: int) -> Message:
            return [protocol.SCORE, number, example.index, packed, grouped]

        size = sum(_nbytes(turn) for rollout in rollouts for turn in rollout.turns)
        _, done = await self._pool.play(None, self._deadline(), message, size)
        _raise_error(done)
        rewards: list[Score] = []
        results = _results(done, len(rollouts))
        for rollout, total, result in zip(rollouts, _rewards(done, len(rollouts)), results, strict=True):
            try:
                found = protocol.take_result(result, rollout.turns)
            except protocol.ProtocolError as error:
                raise WorkerError(f"its worker sent {error}") from None
            rollout.state, rollout.metrics = found.state, found.metrics
            by_turn = found.turn_rewards
            turns = None if by_turn is None else [by_turn.get(index, 0.0) for index in range(len(rollout.turns))]
            rewards.append(total if turns is None else Reward(total, turns))
        return rewards

    def _deadline(self) -> float:
        return asyncio.get_running_loop().time() + self._config.rollout_timeout_seconds


def _raise_error(done: Message) -> None:
    if done[2] is not None:
        raise UnavailableError(done[2]) if done[5] else WorkerError(done[2])


async def _pack(rollouts: Sequence[Rollout]) -> list[list[Any]]:
    if sum(_nbytes(turn) for rollout in rollouts for turn in rollout.turns) < _PACKED_ON_THE_LOOP:
        return [protocol.pack_rollout(rollout) for rollout in rollouts]
    return await asyncio.to_thread(lambda: [protocol.pack_rollout(rollout) for rollout in rollouts])


def _nbytes(turn: Turn) -> int:
    return turn.prompt_ids.nbytes + protocol.answer_bytes(turn)


def _rewards(done: Message, count: int) -> list[float | dict[str, float]]:
    rewards = done[3]
    if rewards is None or len(rewards) != count or not all(type(reward) in (float, dict) for reward in rewards):
        raise WorkerError(f"its worker sent what are no {count} rewards")
    return list(rewards)


def _results(done: Message, count: int) -> list[Any]:
    if len(done[4]) != count:
        raise WorkerError(f"its worker sent {len(done[4])} results; expected {count}")
    return list(done[4])
