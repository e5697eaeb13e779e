"""Loads an evaluation: its environments, their sampling, and its examples.

The choice of examples is a function of names and sizes alone, so every version, run and seed, and `counterpoint eval`, plays
the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.chat import Chat
from counterpoint.environments.lifecycle import check_chat, started
from counterpoint.environments.shuffle import shuffled
from counterpoint.environments.workers.load import load_environment
from counterpoint.inference.base import SamplingParameters
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment, sampling_parameters
from counterpoint.run.config import RunConfig
from counterpoint.run.evaluations import EvaluationConfig
from counterpoint.transport.config import Config


@dataclass(frozen=True, slots=True)
class LoadedEvaluation:
    """An evaluation, ready to be played."""

    config: EvaluationConfig
    environments: dict[str, LoadedEnvironment]
    calling: dict[str, tuple[Chat, SamplingParameters]]
    """Chat template and sampling parameters by environment."""
    sampling: dict[str, Config]
    """The sampling's configuration by environment."""
    examples: list[tuple[str, int]]
    """Environment and index of each example, in the order of play."""

    @property
    def rollouts(self) -> int:
        """The number of rollouts."""
        return len(self.examples) * self.config.rollouts_per_example


def load_evaluation(run: RunConfig, config: EvaluationConfig, chat: Chat) -> LoadedEvaluation:
    """Loads one of the run's evaluations. Raises `ValueError` for an environment or a template variable that does not fit."""
    environments: dict[str, LoadedEnvironment] = {}
    calling: dict[str, tuple[Chat, SamplingParameters]] = {}
    sampling: dict[str, Config] = {}
    examples: list[tuple[str, int]] = []
    for each in config.environments:
        try:
            loaded = environments[each.name] = LoadedEnvironment(each, load_environment(each))
            own = sampling[each.name] = run.sampling_of(each, config)
            own_chat = chat.with_template_kwargs(own.chat_template_kwargs)
            check_chat(each.name, loaded.environment, own_chat)
        except ValueError as error:
            raise ValueError(f"evaluation {config.name!r}: {error}") from error
        calling[each.name] = own_chat, sampling_parameters(own, own_chat)
        examples += [(each.name, index) for index in chosen_examples(config, each.name, len(loaded.environment))]
    return LoadedEvaluation(config, environments, calling, sampling, examples)


def chosen_examples(config: EvaluationConfig, environment: str, size: int) -> list[int]:
    """Returns the indices of the examples that the evaluation plays of an environment with `size` of them, ascending."""
    if config.examples is None or config.examples >= size:
        return list(range(size))
    key = f"evaluation/{config.name}/{environment}"
    return sorted(shuffled(position, size, key) for position in range(config.examples))


@asynccontextmanager
async def environments_started(
    evaluations: Sequence[LoadedEvaluation], directory: Path, model: Path, seed: int
) -> AsyncIterator[None]:
    """Starts the evaluations' environments for the duration of the block, each with a directory in `directory`.

    Raises `ValueError` as `environments.lifecycle.started` does.
    """
    async with AsyncExitStack() as resources:
        for evaluation in evaluations:
            for name, loaded in evaluation.environments.items():
                where = directory / evaluation.config.name / name
                context = EnvironmentContext(f"{evaluation.config.name}/{name}", where, model, seed)
                await resources.enter_async_context(started(loaded.environment, context))
        yield
