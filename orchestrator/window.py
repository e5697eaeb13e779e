"""What happened between two step boundaries, counted once: the source of a step's metrics.

Rewards are those of every completed rollout judged in that time, filtered ones included: leaving out the groups whose
advantage is zero would hide exactly the examples that are always solved. Part of the checkpoint, so that a resumed step
counts what was judged before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from transport.records import Batch, Rollout


class StepWindow:
    """Accumulates on the loop; `take` gives the metrics and starts anew."""

    def __init__(self) -> None:
        self._rewards: dict[str, list[float]] = {}
        self._counts: Counter[str] = Counter()

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Counts a judged group: its rollouts with reward, error and filter decided."""
        for rollout in rollouts:
            self._counts["tokens/prompt"] += sum(len(turn.prompt_ids) for turn in rollout.turns)
            self._counts["tokens/completion"] += sum(len(turn.completion_ids) for turn in rollout.turns)
            if rollout.error is not None or rollout.reward is None:
                self._counts["rollouts/failed"] += 1
                continue
            self._counts["rollouts/completed"] += 1
            self._counts["rollouts/filtered"] += rollout.filtered_by is not None
            self._rewards.setdefault(rollout.environment, []).append(rollout.reward)

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter that appears in the metrics as `name`."""
        self._counts[name] += amount

    def take(self, batch: Batch) -> dict[str, float | int]:
        """The metrics of the step that ships `batch`, under the design's names; the window is empty afterwards."""
        metrics: dict[str, float | int] = dict.fromkeys(
            (
                "rollouts/completed", "rollouts/failed", "rollouts/cancelled", "rollouts/filtered",
                "tokens/prompt", "tokens/completion",
            ),
            0,
        )  # fmt: skip
        metrics |= self._counts
        rewards = np.asarray([reward for rewards in self._rewards.values() for reward in rewards], dtype=np.float64)
        if rewards.size:
            metrics |= {
                "reward/mean": float(rewards.mean()),
                "reward/std": float(rewards.std()),
                "reward/min": float(rewards.min()),
                "reward/max": float(rewards.max()),
            }
        for environment, values in sorted(self._rewards.items()):
            metrics[f"reward/{environment}/mean"] = float(np.mean(values))
        staleness = [batch.step - sample.policy_version for sample in batch.samples]
        if staleness:
            metrics |= {"staleness/mean": float(np.mean(staleness)), "staleness/max": max(staleness)}
        metrics |= {
            "batch/samples": len(batch.samples),
            "batch/tokens": len(batch.token_ids_T),
            "batch/bytes": batch.nbytes,
        }
        self.restore({"rewards": {}, "counts": {}})
        return metrics

    def state(self) -> dict[str, Any]:
        """Plain values for the checkpoint."""
        return {"rewards": {name: list(values) for name, values in self._rewards.items()}, "counts": dict(self._counts)}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what `state` gave."""
        self._rewards = {name: list(values) for name, values in state["rewards"].items()}
        self._counts = Counter(state["counts"])
