"""A rubric: named parts with weights whose sum is the reward. An environment of any kind may score with one.

`Rubric([{"kind": "math"}, ...])` in a constructor, `await rubric.score(example, completion, state)` in `score`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from counterpoint.environments.base import EnvironmentContext, Example
from counterpoint.environments.data.rows import lacks
from counterpoint.environments.rewards.base import MAX_PARTS, Attempt, RewardFunction, Value
from counterpoint.environments.rewards.code.config import CodeConfig
from counterpoint.environments.rewards.code.reward import CodeReward
from counterpoint.environments.rewards.config import ExactConfig, FunctionConfig, MathConfig, PartConfig, RegexConfig
from counterpoint.environments.rewards.function import FunctionReward
from counterpoint.environments.rewards.judge.config import JudgeConfig
from counterpoint.environments.rewards.judge.reward import JudgeReward
from counterpoint.environments.rewards.processes import BoundedProcesses
from counterpoint.environments.rewards.verifiable import ExactReward, MathReward, RegexReward

TOTAL = "total"
"""The metric of the weighted sum."""

AnyPart = Annotated[
    MathConfig | ExactConfig | RegexConfig | FunctionConfig | JudgeConfig | CodeConfig, Field(discriminator="kind")
]

_PARTS: TypeAdapter[list[AnyPart]] = TypeAdapter(list[AnyPart])


@dataclass(frozen=True, slots=True)
class Scored:
    """The outcome for one attempt."""

    reward: float
    metrics: dict[str, float]
    """`total`, each part's value by its name, and `<part>/<metric>`."""


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    config: PartConfig
    function: RewardFunction


class Rubric:
    """Scores attempts by several parts. Safe to share between rollouts."""

    def __init__(self, parts: Sequence[Mapping[str, Any]], processes: int = 2) -> None:
        """`parts` are as in a configuration file; `processes` is how many work on hostile text at once.

        Raises `ValueError` that names the part and the key.
        """
        self._processes = BoundedProcesses(processes)
        self._parts = [_Part(name, config, self._build(name, config)) for name, config in _named(_validated(parts))]
        self._gates = [part for part in self._parts if part.config.required is not None]
        self._others = [part for part in self._parts if part.config.required is None]

    async def start(self, context: EnvironmentContext) -> None:
        """Starts every part. Call it from the environment's `start`."""
        for part in self._parts:
            await part.function.start(context)

    def require_columns(self, row: Mapping[str, Any], where: str) -> None:
        """Raises `ValueError`, which begins with `where`, if a part reads a column that the row lacks."""
        for part in self._parts:
            for column in sorted(part.function.columns - row.keys()):
                raise ValueError(f"{where}: part {part.name!r}: {lacks(column, list(row))}")

    @property
    def state_keys(self) -> tuple[str, ...] | None:
        """The names that its parts put into a rollout's state; None if one is a function, which may put in its own."""
        if any(isinstance(part.config, FunctionConfig) for part in self._parts):
            return None
        return ("judge",) if any(isinstance(part.config, JudgeConfig) for part in self._parts) else ()

    @property
    def reward_bounds(self) -> tuple[float, float] | None:
        """The least and the greatest reward; None if a part that counts has no bounds, or if the reward is always the same."""
        ends = [(0.0, 0.0)]
        for part in self._parts:
            if part.config.weight:
                if part.function.bounds is None:
                    return None
                least, greatest = sorted(part.config.weight * end for end in part.function.bounds)
                ends.append((least, greatest))
        least, greatest = (math.fsum(each) for each in zip(*ends, strict=True))
        if self._gates:  # one that is not reached makes it 0
            least, greatest = min(least, 0.0), max(greatest, 0.0)
        return (least, greatest) if least < greatest else None

    async def score(self, example: Example, completion: str, state: dict[str, Any]) -> Scored:
        """Returns reward and metrics of an attempt. Raises what a part raises: no part is guessed or left out."""
        attempt = Attempt(example, completion, state)
        metrics: dict[str, float] = {}
        total = 0.0
        for part in self._gates:
            value = await part.function.score(attempt)
            total += _add(metrics, part, value)
            assert part.config.required is not None
            if value.value < part.config.required:
                return Scored(0.0, {TOTAL: 0.0} | metrics)
        values = await _all_or_none(self._others, attempt)
        total += math.fsum(_add(metrics, part, value) for part, value in zip(self._others, values, strict=True))
        return Scored(total, {TOTAL: total} | metrics)

    async def close(self) -> None:
        """Frees what the parts hold. Call it from the environment's `close`."""
        async with AsyncExitStack() as stack:  # which calls all, whatever one of them raises
            stack.push_async_callback(self._processes.close)
            for part in self._parts:
                stack.push_async_callback(part.function.close)

    def _build(self, name: str, config: PartConfig) -> RewardFunction:
        match config:
            case MathConfig():
                return MathReward(config, name, self._processes)
            case ExactConfig():
                return ExactReward(config, name, self._processes)
            case RegexConfig():
                return RegexReward(config, name, self._processes)
            case FunctionConfig():
                return FunctionReward(config, name)
            case CodeConfig():
                return CodeReward(config, name)
            case JudgeConfig():
                return JudgeReward(config, name, self._processes)
        raise AssertionError(f"a kind without a class: {config}")


def paid_parts(parts: Sequence[Any]) -> tuple[str, ...]:
    """Returns the names of a rubric's parts that raise the reward, those with a positive weight; none of another list."""
    try:
        return tuple(name for name, config in _named(_validated(parts)) if config.weight > 0)
    except ValueError:
        return ()


def _validated(parts: Sequence[Mapping[str, Any]]) -> list[AnyPart]:
    if isinstance(parts, str | Mapping) or not all(isinstance(part, Mapping) for part in parts):
        raise ValueError(f'rubric = {parts!r}; expected a list of tables, such as rubric = [{{ kind = "exact" }}]')
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"rubric has {len(parts)} parts; expected 1 to {MAX_PARTS}")
    try:
        return _PARTS.validate_python([dict(part) for part in parts])
    except ValidationError as error:
        faults = [
            f"rubric[{fault['loc'][0]}]{''.join(f'.{key}' for key in fault['loc'][2:])}: "
            + (
                f"unknown key of the kind {fault['loc'][1]!r}; docs/rewards.md has its keys"
                if fault["type"] == "extra_forbidden"
                else fault["msg"]
            )
            for fault in error.errors(include_url=False, include_input=False)
        ]
        raise ValueError("; ".join(faults)) from None


def _named(configs: Sequence[PartConfig]) -> list[tuple[str, PartConfig]]:
    named = [(config.name or str(getattr(config, "kind", "")), config) for config in configs]
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"rubric has two parts named {name!r}; give each a name of its own")
        if name == TOTAL:
            raise ValueError(f"rubric has a part named {TOTAL!r}, which is the name of their sum")
    return named


def _add(metrics: dict[str, float], part: _Part, value: Value) -> float:
    metrics[part.name] = value.value
    metrics.update({f"{part.name}/{name}": number for name, number in value.metrics.items()})
    return part.config.weight * value.value


async def _all_or_none(parts: Sequence[_Part], attempt: Attempt) -> list[Value]:
    """Scores parts at once. The first failure cancels the others, and is raised."""
    tasks = [asyncio.create_task(part.function.score(attempt), name=f"part {part.name}") for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
