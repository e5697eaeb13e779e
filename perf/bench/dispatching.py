"""Runs the daemon's scheduler, dispatcher and step boundary for benchmarks, without a tokenizer or a real trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

from counterpoint.environments.base import Environment
from counterpoint.environments.chat import Chat
from counterpoint.orchestrator.decisions import DecisionLog
from counterpoint.orchestrator.dispatcher import Dispatcher, RunParts, StepHooks
from counterpoint.orchestrator.metrics import MetricsLine
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment
from counterpoint.orchestrator.rollouts.players import GroupsPool
from counterpoint.orchestrator.rollouts.playing import Playing
from counterpoint.orchestrator.scheduling.events import CapacityChanged, PolicyUpdated
from counterpoint.orchestrator.scheduling.scheduler import RolloutScheduler
from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.orchestrator.step.boundary import StepBoundary
from counterpoint.orchestrator.step.sender import Sender
from counterpoint.run.config import RunConfig
from counterpoint.run.loop_health.gc_tuning import RolloutCounts
from counterpoint.run.loop_health.health import LoopMonitors
from counterpoint.transport.records import Batch


async def run_to_the_end(
    config: RunConfig,
    pool: GroupsPool,
    environment: Environment,
    rollout_counts: RolloutCounts,
    publish: Callable[[MetricsLine], None] = lambda line: None,
) -> None:
    """Takes `config.steps` steps of `environment`, by the name of the first one configured. `config.run_dir` must exist.

    `publish` gets the metrics of each.
    """
    trainer = _InstantTrainer()
    (entry,) = config.environments
    health = LoopMonitors(config.lag)
    health.rollout_counts = rollout_counts
    with health.blame:
        async with asyncio.TaskGroup() as tasks:
            monitor = tasks.create_task(health.lag.run())
            parts = RunParts(
                scheduler=RolloutScheduler(config.schedule, config.steps, _Examples(entry.name)),
                playing=Playing(
                    config,
                    {entry.name: LoadedEnvironment(entry, environment)},
                    {entry.name: cast(Chat, NoTokenizer())},
                    pool,
                ),
                sender=cast(Sender, trainer),
                boundary=StepBoundary(config.run_dir, config.run_id, {entry.name: []}),
                health=health,
                decisions=DecisionLog(config.run_dir),
            )
            hooks = StepHooks(publish=publish, on_progress=lambda: None)
            advantage = load_advantage(config.advantage)
            dispatcher = trainer.dispatcher = Dispatcher(config, advantage, parts, hooks, tasks)
            dispatcher.handle(CapacityChanged(config.schedule.most_in_flight))
            dispatcher.handle(PolicyUpdated(0))
            await dispatcher.finished.wait()
            monitor.cancel()


class NoTokenizer:
    """Stands for the chat template, which nothing asks."""

    stop_token_ids = (2,)


class _Examples:
    """Examples in order."""

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._drawn = 0

    def next(self) -> tuple[str, int]:
        self._drawn += 1
        return self._environment, self._drawn

    def observe(self, environment: str, index: int, rewards: Sequence[float]) -> None:
        pass

    def drawn_in_vain(self, environment: str) -> None:
        pass

    def take_metrics(self) -> dict[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class _InstantTrainer:
    """Stands for the sender."""

    def __init__(self) -> None:
        self.newest_step = 0
        self.dispatcher: Dispatcher

    def offer(self, batch: Batch, nbytes: int) -> None:
        """Accepts a batch."""

    def commit(self, step: int) -> None:
        """Counts a step as trained."""
        self.newest_step = step
        self.dispatcher.handle(PolicyUpdated(step))
