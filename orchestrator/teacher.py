"""The teacher of a run: a served model that gives, after each rollout, the log-probabilities of the policy's tokens.

A request asks for all tokens of a branch at once, in the rollout's task, while other rollouts are played. The answers become
the column `teacher_log_probabilities` of the rollout's turns, which travels to the trainer. A teacher that does not answer in
time fails that rollout alone. As an opponent (`orchestrator/opponents.py`) it is a name at the run's servers, or at others.
Each server gets at most `teacher.max_concurrent_requests` at once, and no weight update of the run reaches it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Protocol

import numpy as np

from counterpoint.environments.chat import Chat
from counterpoint.inference.base import InferenceError, RequestRefused
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.orchestrator.other_servers import compare_tokenizers
from counterpoint.orchestrator.run_directory import ConfigurationError
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.watchdog import awaiting
from counterpoint.transport.outages import Outages
from counterpoint.transport.records import TEACHER_LOG_PROBABILITIES, Float32Array, Int32Array, Rollout


class ScoringPool(Protocol):
    """The part of `inference.pool.pool.Served` that a teacher uses."""

    async def score(self, token_ids: Int32Array, start: int, *, affinity: str) -> Float32Array:
        """Returns the log-probability of each token from `start` on. Raises `InferenceError`."""

    def forget_group(self, affinity: str) -> None:
        """Notes that all rollouts of a group have ended. `affinity` is that of any of them."""


class Teacher:
    """Asks a pool about rollouts."""

    def __init__(self, pool: ScoringPool) -> None:
        self._pool = pool

    def forget_group(self, rollout: Rollout) -> None:
        """Notes that all rollouts of this one's group have ended."""
        self._pool.forget_group(rollout.rollout_id)

    async def ask(self, rollout: Rollout) -> None:
        """Sets the column of every turn of a completed rollout, or its `error` and `inference_failed`."""
        try:
            with awaiting(f"the teacher's log-probabilities of rollout {rollout.rollout_id}", "inference"):
                await self._ask(rollout)
        except InferenceError as error:
            rollout.error = f"the teacher gave no log-probabilities: {error}"
            rollout.inference_failed = not isinstance(error, RequestRefused)

    async def _ask(self, rollout: Rollout) -> None:
        for branch in rollout.branches or ():
            start = len(branch.turns[0].prompt_ids)
            scores = np.empty(0, np.float32)
            if start < len(branch.token_ids_T):  # else all of its completions are empty
                scores = await self._pool.score(branch.token_ids_T, start, affinity=rollout.rollout_id)
            for turn in branch.turns:
                first = len(turn.prompt_ids) - start
                turn.columns[TEACHER_LOG_PROBABILITIES] = scores[first : first + len(turn.completion_ids)]


@asynccontextmanager
async def teacher_of(
    config: RunConfig, chat: Chat, servers: InferencePool, outages: Outages | None = None
) -> AsyncIterator[Teacher | None]:
    """Yields the teacher once a server is healthy and its tokenizer compared, or None without one. Releases it.

    `servers` are the run's. Adds outages of others' servers to `outages`.

    Raises `ConfigurationError` for a teacher that cannot be, `InferenceError` if no server becomes healthy in time.
    """
    if config.teacher is None:
        yield None
        return
    pool = _served(config, servers, outages)
    try:
        with awaiting("the first healthy server of the teacher", pool.describe_sources()):
            try:
                await pool.start()
            except InferenceError as error:
                raise InferenceError(f"teacher: {error}") from error
        teacher = Teacher(pool)
        with awaiting("the comparison of the teacher's tokenizer with the run's", pool.describe_sources()):
            reads = partial(pool.detokenize, affinity="the tokenizer of the teacher")
            advice = "a teacher needs the policy's vocabulary, as another model of its family has"
            await compare_tokenizers(reads, chat, "teacher", advice)
        yield teacher
    finally:
        await pool.release()


def _served(config: RunConfig, servers: InferencePool, outages: Outages | None) -> Served:
    teacher = config.teacher
    assert teacher is not None
    model, called = teacher.model or config.served_model or config.model, "the teacher's server"
    limit = teacher.max_concurrent_requests
    if not teacher.urls:
        return servers.model(model, limit=limit, called=called)
    try:
        own = config.inference.apart(teacher.urls, teacher.protocol, teacher.api_key_file, limit)
        return InferencePool(own, outages=outages).model(model, called=called)
    except ValueError as error:
        raise ConfigurationError(f"teacher: {error}") from error
