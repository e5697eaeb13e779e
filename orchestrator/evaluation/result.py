"""The result of an evaluation: estimates from its rollouts, and their forms: a line of `evaluations.jsonl`, metrics, a score.

Every rollout counts. A failed one is no success in pass@k, and has no reward. The mean reward is over the others, and the line
counts both. A result with more than `MOST_FAILED` failures is never the best. If every rollout failed there is no estimate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from counterpoint.environments.reward import RewardBounds
from counterpoint.orchestrator.evaluation.estimates import Estimate, mean, pass_at_k, proportion
from counterpoint.orchestrator.evaluation.lines import MOST_FAILED
from counterpoint.orchestrator.step.step_metrics import turns_of
from counterpoint.run.evaluations import EvaluationConfig
from counterpoint.transport.config import Config
from counterpoint.transport.printable import clipped
from counterpoint.transport.records import Rollout

_MOST_FAILURES = 16
"""Different errors in a line. Further ones are counted together."""

_LONGEST_ERROR = 300
"""Characters of the longest error text in a line."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of one evaluation of one step."""

    config: EvaluationConfig
    step: int
    estimates: dict[str, Estimate]
    """The estimate of each metric: `reward/mean`, `pass@1`, the same after `<environment>/`, and there
    `reward/turn/<turns>/mean`, where turns have rewards."""
    failed: int
    line: dict[str, Any]
    """The line of `evaluations.jsonl`."""

    @property
    def score(self) -> float | None:
        """The value that `keep_best` names, or None if it names none or too many rollouts failed."""
        if self.config.keep_best is None or self.failed > MOST_FAILED * (self.failed + self.line["rollouts/completed"]):
            return None
        estimate = self.estimates.get(self.config.keep_best)
        return None if estimate is None else estimate.value

    def in_words(self) -> str:
        """Returns the result as a line of the log."""
        shown = ", ".join(
            f"{name} {each.value:.4g}"
            + ("" if each.low is None or each.high is None else f" ({each.low:.4g} to {each.high:.4g})")
            for name, each in self.estimates.items()
            if name in self.config.own_metrics
        )
        of_step = "" if self.line["step"] is None else f" of step {self.line['step']}"
        first, last = self.line["policy_version/min"], self.line["policy_version/max"]
        versions = "unknown" if first is None else f"{first}" if first == last else f"{first} to {last}"
        return (
            f"evaluation {self.config.name}{of_step}: {shown or 'failed'}; {self.failed} of "
            f"{self.failed + self.line['rollouts/completed']} rollouts failed; policy versions {versions}; "
            f"{self.line['seconds']:.1f} s"
        )

    def metrics(self) -> dict[str, float]:
        """Returns the numbers for `metrics.jsonl` and Prometheus, by name."""
        prefix = f"evaluation/{self.config.name}"
        metrics = {f"{prefix}/step": float(self.step), f"{prefix}/rollouts/failed": float(self.failed)}
        for name, estimate in self.estimates.items():
            for suffix, value in (("", estimate.value), ("/low", estimate.low), ("/high", estimate.high)):
                if value is not None:
                    metrics[f"{prefix}/{name}{suffix}"] = value
        return metrics


def result_of(
    config: EvaluationConfig,
    sampling: Mapping[str, Config],
    step: int,
    rollouts: Sequence[Rollout],
    started_at: float,
    seconds: float,
    bounds: Mapping[str, RewardBounds | None],
) -> EvaluationResult:
    """Returns the result of rollouts that have all ended. `started_at` is a Unix time.

    `bounds` are those of the rewards, by environment. A reward that is not finite becomes a failure of its rollout, which is
    changed.
    """
    for rollout in rollouts:
        if rollout.error is None and (rollout.reward is None or not math.isfinite(rollout.reward)):
            rollout.error = f"the reward is {rollout.reward}; expected a finite number"
    estimates = _estimates(config, rollouts, bounds)
    if len(config.environments) > 1:
        for environment in config.environments:
            own = [rollout for rollout in rollouts if rollout.environment == environment.name]
            estimates |= {f"{environment.name}/{name}": each for name, each in _estimates(config, own, bounds).items()}
    else:  # the same numbers
        estimates |= {f"{config.environments[0].name}/{name}": each for name, each in estimates.items()}
    estimates |= _by_turn(rollouts, bounds)
    failed = [rollout for rollout in rollouts if rollout.error is not None]
    versions = [turn.policy_version for rollout in rollouts for turn in rollout.turns]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    line = {
        "evaluation": config.name,
        "step": step,
        "time": started_at + seconds,
        "seconds": seconds,
        "policy_version/min": min(versions, default=None),
        "policy_version/max": max(versions, default=None),
        "examples": len({(rollout.environment, rollout.example_index) for rollout in rollouts}),
        "rollouts_per_example": config.rollouts_per_example,
        "success": config.success,
        "reward_bounds": _common(bounds, rollouts),
        "sampling": {name: each.model_dump(mode="json") for name, each in sampling.items()},
        "rollouts/completed": len(rollouts) - len(failed),
        "rollouts/failed": len(failed),
        "rollouts/inference_failed": sum(rollout.inference_failed for rollout in failed),
        "failures": _failures(failed),
        "tokens/prompt": sum(len(turn.prompt_ids) for turn in turns),
        "tokens/completion": sum(len(turn.completion_ids) for turn in turns),
        "metrics": {
            name: {"value": each.value, "low": each.low, "high": each.high} for name, each in estimates.items()
        },
    }
    return EvaluationResult(config, step, estimates, len(failed), line)


def _estimates(
    config: EvaluationConfig, rollouts: Sequence[Rollout], bounds: Mapping[str, RewardBounds | None]
) -> dict[str, Estimate]:
    if all(rollout.error is not None for rollout in rollouts):
        return {}
    examples: dict[tuple[str, int], list[Rollout]] = {}
    for rollout in rollouts:
        examples.setdefault((rollout.environment, rollout.example_index), []).append(rollout)
    rewards = [
        [rollout.reward for rollout in group if rollout.error is None and rollout.reward is not None]
        for group in examples.values()
    ]
    scored = [math.fsum(group) / len(group) for group in rewards if group]
    estimates = {"reward/mean": mean(scored, _common(bounds, rollouts))} if scored else {}
    for k in config.pass_at:
        passed = [
            pass_at_k(len(group), sum(reward >= config.success for reward in own), k)
            for group, own in zip(examples.values(), rewards, strict=True)
        ]
        estimates[f"pass@{k}"] = proportion(passed)
    return estimates


def _by_turn(rollouts: Sequence[Rollout], bounds: Mapping[str, RewardBounds | None]) -> dict[str, Estimate]:
    """Estimates the mean reward of the turns with a number, of the completed rollouts of each environment."""
    found: dict[tuple[str, str], dict[int, list[float]]] = {}
    for rollout in rollouts:
        if rollout.error is None and rollout.turn_rewards is not None:
            for number, reward in enumerate(rollout.turn_rewards.tolist(), start=1):
                examples = found.setdefault((rollout.environment, turns_of(number)), {})
                examples.setdefault(rollout.example_index, []).append(reward)
    return {
        f"{environment}/reward/turn/{turns}/mean": mean(
            [math.fsum(rewards) / len(rewards) for rewards in examples.values()], bounds.get(environment)
        )
        for (environment, turns), examples in found.items()
    }


def _common(bounds: Mapping[str, RewardBounds | None], rollouts: Sequence[Rollout]) -> RewardBounds | None:
    """Returns the common bounds of these rollouts' rewards, or None if those of one environment are unknown."""
    known = [bounds.get(name) for name in {rollout.environment for rollout in rollouts}]
    found = [each for each in known if each is not None]
    if len(found) < len(known):
        return None
    return min(least for least, _ in found), max(greatest for _, greatest in found)


def _failures(failed: Sequence[Rollout]) -> dict[str, int]:
    """Counts errors by their first line, the most frequent first."""
    counts = Counter(clipped((rollout.error or "").partition("\n")[0], _LONGEST_ERROR) for rollout in failed)
    most = dict(counts.most_common(_MOST_FAILURES))
    others = counts.total() - sum(most.values())
    return most | ({"others": others} if others else {})
