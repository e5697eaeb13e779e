"""Computes a step's metrics from the rollouts that it counts: those that ship and those discarded since the last step.

So each finalized rollout counts in exactly one step, filtered ones included: without groups of zero advantage, examples that are
always solved would be missing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from counterpoint.orchestrator.credit.equal_rewards import differ
from counterpoint.orchestrator.credit.turn_advantages import turn_returns
from counterpoint.orchestrator.rollouts.branching import branch_metrics
from counterpoint.orchestrator.rollouts.failures import count_failures
from counterpoint.orchestrator.step.advantages import AdvantageInputs
from counterpoint.transport.exact_json import loads
from counterpoint.transport.records import Batch, Rollout

ENVIRONMENT_PREFIX = "environment/"
"""Prefix of the metrics `environment/<environment>/<metric>/mean`."""

MAX_ENVIRONMENT_METRICS = 64
"""Most metrics of one environment in a line: those that come first."""

SINGLE_TURNS = 8
"""The first turns, which have a metric each. Later ones share one with as many turns as came before, and so on."""

LAST_TURNS = 1024
"""The turns after this one share one metric: an environment has at most 16 of them."""

MAX_NAME = 64
"""Characters of a metric's name, which is cut there."""

LEAST_EXAMPLES = 4
"""Examples of an environment in a step without which it says nothing that they share answers."""

RESTORED_TOKENS = "tokens/restored"
"""The part of `tokens/completion` that an earlier process of the run generated."""

_MAX_BYTES = 65536
"""The size of a rollout's encoded metrics. Larger ones do not count."""

_NO_PART_OF_A_NAME = re.compile(r"[^A-Za-z0-9_./-]")


def step_metrics(batch: Batch, rollouts: Sequence[Rollout]) -> dict[str, float | int]:
    """Returns the metrics of the step that ships `batch`, by name. Reads every turn: call it in a thread."""
    staleness = [batch.step - sample.policy_version for sample in batch.samples]
    completed = _completed(rollouts)
    return {
        **additive_metrics(rollouts),
        "staleness/mean": float(np.mean(staleness)),
        "staleness/max": max(staleness),
        "batch/samples": len(batch.samples),
        "batch/tokens": len(batch.token_ids_T),
        "batch/bytes": batch.nbytes,
        **branch_metrics(rollouts),
        **_reward_metrics(completed),
        "length/mean": float(np.mean([sum(len(turn.completion_ids) for turn in each.turns) for each in completed])),
        **answer_metrics(completed),
        **_cache_metrics(rollouts),
        **environment_metrics(completed),
    }


def additive_metrics(rollouts: Sequence[Rollout]) -> dict[str, int]:
    """Returns the metrics that are sums over finalized rollouts. Filtered ones are among the completed."""
    completed = [rollout for rollout in rollouts if rollout.error is None]
    inference_failed = sum(rollout.inference_failed for rollout in rollouts)
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    return {
        "rollouts/completed": len(completed),
        "rollouts/failed": sum(rollout.error is not None for rollout in rollouts) - inference_failed,
        "rollouts/inference_failed": inference_failed,
        "rollouts/filtered": sum(rollout.filtered_by is not None for rollout in completed),
        "tokens/prompt": sum(len(turn.prompt_ids) for turn in turns),
        "tokens/completion": completion_tokens(rollouts),
        "tokens/untrained": sum(turn.untrained.count(1) for turn in turns),
        **count_failures(rollouts),
    }


def completion_tokens(rollouts: Sequence[Rollout]) -> int:
    """Returns the number of tokens that the model wrote in all turns of these rollouts."""
    return sum(len(turn.completion_ids) for rollout in rollouts for turn in rollout.turns)


def _cache_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns the share of prompt tokens that servers had cached, over turns with a server that reports it, if any."""
    turns = [turn for rollout in rollouts for turn in rollout.turns if turn.cached_tokens is not None]
    prompt = sum(len(turn.prompt_ids) for turn in turns)
    return {"inference/cache_hit_share": sum(turn.cached_tokens or 0 for turn in turns) / prompt} if prompt else {}


def _completed(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if rollout.error is None and rollout.reward is not None]


def _reward_metrics(completed: Sequence[Rollout]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    parts: dict[str, list[float]] = {}
    for rollout in completed:
        assert rollout.reward is not None
        rewards.setdefault(rollout.environment, []).append(rollout.reward)
        for player, reward in rollout.player_rewards.items():
            parts.setdefault(f"{rollout.environment}/player/{player}", []).append(reward)
        for turn, reward in enumerate(() if rollout.turn_rewards is None else rollout.turn_rewards.tolist(), start=1):
            parts.setdefault(f"{rollout.environment}/turn/{turns_of(turn)}", []).append(reward)
    everything = np.asarray([reward for values in rewards.values() for reward in values])
    metrics = {
        "reward/mean": float(everything.mean()),
        "reward/std": float(everything.std()),
        "reward/min": float(everything.min()),
        "reward/max": float(everything.max()),
    }
    return metrics | {
        f"reward/{name}/mean": float(np.mean(values)) for name, values in sorted((rewards | parts).items())
    }


def turns_of(turn: int) -> str:
    """Returns which turns a metric is of that has turn number `turn`, counted from 1: `1` to `8`, `9-16`, ..., `1025-`."""
    if turn <= SINGLE_TURNS:
        return str(turn)
    before = min(1 << (turn - 1).bit_length() - 1, LAST_TURNS)
    return f"{before + 1}-{2 * before if before < LAST_TURNS else ''}"


def answer_metrics(completed: Sequence[Rollout]) -> dict[str, float]:
    """Returns what completed rollouts, one at least, say of health: answers that are cut or alike, groups that are equal.

    `orchestrator/early_warnings/rules.py` watches these.
    """
    metrics = {"length/cut": _share(map(_is_cut, completed))}
    if groups := [group for group in _by(completed, "group_id").values() if len(group) > 1]:
        metrics["groups/no_difference"] = _share(not _shows_difference(group) for group in groups)
    for environment, rollouts in sorted(_by(completed, "environment").items()):
        cut = [rollout.reward or 0.0 for rollout in rollouts if _is_cut(rollout)]
        metrics[f"length/{environment}/cut"] = len(cut) / len(rollouts)
        if cut:
            metrics[f"length/{environment}/cut_reward"] = sum(cut) / len(cut)
        answers = [(rollout.group_id, _answer(rollout)) for rollout in rollouts]
        metrics[f"answers/{environment}/repeated"] = 1 - len(set(answers)) / len(answers)
        examples = {(rollout.example_index, answer) for rollout, (_, answer) in zip(rollouts, answers, strict=True)}
        if len({example for example, _ in examples}) >= LEAST_EXAMPLES:
            having = Counter(answer for _, answer in examples)
            metrics[f"answers/{environment}/shared"] = _share(having[answer] > 1 for _, answer in answers)
    return metrics


def _shows_difference(group: Sequence[Rollout]) -> bool:
    """Returns whether a group's rewards differ, or those of a player in it, or the sums of its turns' from a turn on."""
    rewards = {"": [each.reward or 0.0 for each in group]}
    for rollout in group:
        for player, reward in rollout.player_rewards.items():
            rewards.setdefault(f"player {player}", []).append(reward)
    if any(map(differ, rewards.values())):
        return True
    has_turns = any(each.turn_rewards is not None for each in group)
    return has_turns and any(above.any() for above in turn_returns(AdvantageInputs([*group]).turn_rewards, 1.0))


def _by(rollouts: Sequence[Rollout], name: str) -> dict[object, list[Rollout]]:
    found: dict[object, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(getattr(rollout, name), []).append(rollout)
    return found


def _share(values: Iterable[bool]) -> float:
    found = [*values]
    return sum(found) / len(found)


def _is_cut(rollout: Rollout) -> bool:
    """Whether a turn of it ended because it was as long as it may be."""
    return any(turn.finish_reason == "length" for turn in rollout.turns)


def _answer(rollout: Rollout) -> int:
    """Returns a number that is the same for the same completions."""
    return hash(tuple(turn.completion_ids.tobytes() for turn in rollout.turns))


def environment_metrics(completed: Sequence[Rollout]) -> dict[str, float]:
    """Returns the mean of each metric over the completed rollouts of its environment that have it.

    These are foreign data. This bounds their number, names and size, and only finite numbers count, so that no environment can
    fill the line or name a metric of ours.
    """
    values: dict[str, dict[str, list[float]]] = {}
    for rollout in completed:
        of_environment = values.setdefault(rollout.environment, {})
        for name, value in _numbers(_metrics_of(rollout)):
            if name in of_environment or len(of_environment) < MAX_ENVIRONMENT_METRICS:
                of_environment.setdefault(name, []).append(value)
    return {
        f"{ENVIRONMENT_PREFIX}{environment}/{name}/mean": mean
        for environment, of_environment in sorted(values.items())
        for name, numbers in sorted(of_environment.items())
        if math.isfinite(mean := math.fsum(number / len(numbers) for number in numbers))
    }


def _metrics_of(rollout: Rollout) -> Mapping[Any, Any]:
    """Returns the metrics as they were when the group was finalized."""
    if rollout.saved is None:
        return rollout.metrics
    if len(rollout.saved.metrics) > _MAX_BYTES:
        return {}
    metrics = loads(rollout.saved.metrics)
    return metrics if isinstance(metrics, dict) else {}


def _numbers(metrics: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(name, str) and name and isinstance(value, int | float):
            try:
                number = float(value)
            except OverflowError:  # an int beyond the floats
                continue
            if math.isfinite(number):
                yield _NO_PART_OF_A_NAME.sub("_", name)[:MAX_NAME], number
