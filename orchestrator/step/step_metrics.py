"""Computes a step's metrics from the rollouts that it counts: those that ship and those discarded since the last step.

So each finalized rollout counts in exactly one step, filtered ones included: without groups of zero advantage, examples that are
always solved would be missing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.rollouts.failures import count_failures
from orchestrator.step.environment_metrics import environment_metrics
from transport.records import Batch, Rollout


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
        **_reward_metrics(completed),
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
        "tokens/completion": sum(len(turn.completion_ids) for turn in turns),
        "tokens/untrained": sum(turn.untrained.count(1) for turn in turns),
        **count_failures(rollouts),
    }


def _cache_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Returns the share of prompt tokens that servers had cached, of those turns whose server says so; nothing without any."""
    turns = [turn for rollout in rollouts for turn in rollout.turns if turn.cached_tokens is not None]
    prompt = sum(len(turn.prompt_ids) for turn in turns)
    return {"inference/cache_hit_share": sum(turn.cached_tokens or 0 for turn in turns) / prompt} if prompt else {}


def _completed(rollouts: Sequence[Rollout]) -> list[Rollout]:
    return [rollout for rollout in rollouts if rollout.error is None and rollout.reward is not None]


def _reward_metrics(completed: Sequence[Rollout]) -> dict[str, float]:
    rewards: dict[str, list[float]] = {}
    players: dict[str, list[float]] = {}
    for rollout in completed:
        assert rollout.reward is not None
        rewards.setdefault(rollout.environment, []).append(rollout.reward)
        for player, reward in rollout.player_rewards.items():
            players.setdefault(f"{rollout.environment}/player/{player}", []).append(reward)
    everything = np.asarray([reward for values in rewards.values() for reward in values])
    metrics = {
        "reward/mean": float(everything.mean()),
        "reward/std": float(everything.std()),
        "reward/min": float(everything.min()),
        "reward/max": float(everything.max()),
    }
    return metrics | {
        f"reward/{name}/mean": float(np.mean(values)) for name, values in sorted((rewards | players).items())
    }
