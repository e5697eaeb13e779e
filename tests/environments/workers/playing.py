"""Plays rollouts with workers as the dispatcher does, with a pool of servers that answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.lifecycle import started
from counterpoint.environments.workers.load import load_environment
from counterpoint.environments.workers.proxy import WorkerEnvironment
from counterpoint.inference.base import SamplingParameters
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment, PolicyModel, play
from counterpoint.transport.records import Int32Array, Rollout, Turn
from tests.environments.workers.faulty import FAULTS
from tests.support.rollouts import make_turn

DEADLINE: ContextVar[float] = ContextVar("deadline", default=60.0)
"""The deadline of the rollout that the current task plays, in seconds: a run has one for all."""

KIND = "tests.environments.workers.faulty:Faulty"
NEVER_ANSWERED = 666


@dataclass
class Servers:
    """`GeneratingPool`: the completion of a prompt is its length and its sum, then the number of the answer."""

    asked: list[list[int]] = field(default_factory=list)

    async def generate(
        self, prompt_ids: Int32Array, sampling: SamplingParameters, *, affinity: str, routed_experts_start: int = 0
    ) -> Turn:
        prompt = prompt_ids.tolist()
        self.asked.append(prompt)
        await asyncio.sleep(0)
        if prompt == [NEVER_ANSWERED]:
            await asyncio.Event().wait()
        completion = [len(prompt), int(np.sum(prompt)), len(self.asked)]
        return make_turn(prompt, completion, version=3, start=routed_experts_start)


@dataclass
class Playing:
    """A started environment with workers."""

    environment: WorkerEnvironment
    loaded: LoadedEnvironment
    servers: Servers
    chat: Chat
    number: int = 0
    model: PolicyModel | None = None
    """The model of the newest rollout."""

    async def play(self, fault: str, seconds: float = 60.0) -> Rollout:
        """One rollout of that fault, ended. `seconds` is its deadline."""
        DEADLINE.set(seconds)
        self.number += 1
        index = FAULTS.index(fault)
        rollout = Rollout(f"{self.number}-0", self.number, self.loaded.config.name, index)
        parameters = SamplingParameters(temperature=1.0, max_tokens=8, stop_token_ids=(2,))
        model = PolicyModel(rollout, self.chat, self.servers, parameters, {"other": self.servers})
        self.model = model
        config = self.loaded.config.model_copy(update={"rollout_timeout_seconds": seconds})
        await play(LoadedEnvironment(config, self.environment), rollout, model)
        return rollout

    @property
    def pool(self) -> Any:
        return self.environment._pool

    def pids(self) -> set[int]:
        return {worker.process.pid for worker in self.pool.workers if worker.process is not None}


@asynccontextmanager
async def playing(directory: Path, model: Path, **keys: Any) -> AsyncIterator[Playing]:
    """An environment with workers, for the block."""
    config = EnvironmentConfig(**{"name": "mine", "kind": KIND, "workers": 2, "rollout_timeout_seconds": 60.0, **keys})
    environment = cast(WorkerEnvironment, await asyncio.to_thread(load_environment, config))
    context = EnvironmentContext(config.name, directory / "environments" / config.name, model, 3)
    environment._deadline = lambda: asyncio.get_running_loop().time() + DEADLINE.get()  # type: ignore[method-assign]
    async with started(environment, context):
        await wait_until(lambda: all(worker.ready for worker in environment._pool.workers))
        yield Playing(environment, LoadedEnvironment(config, environment), Servers(), Chat(model))


async def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Waits for what processes bring about, which sets no event."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
