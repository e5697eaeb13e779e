"""The rows of the table of bias: advantages, losses and selections of rollouts, each with when its bias matters.

Every built-in advantage and loss has one (`tests/perf/bias/test_table.py`), but for the losses that follow no reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from counterpoint.run.loss import LossConfig
from perf.bias.update import Selection

_SUMS: dict[str, Any] = {"normalisation": "sample", "normalisation_length": 1}


@dataclass(frozen=True, slots=True)
class LossRow:
    """A configuration of `[training.loss]`, and when its bias matters."""

    keys: dict[str, Any]
    matters: str = ""

    @property
    def config(self) -> LossConfig:
        """The configuration with all defaults."""
        length = {"normalisation_length": 1} if self.keys["kind"] == "dr_grpo" else {}
        return LossConfig.model_validate(self.keys | length)

    @property
    def label(self) -> str:
        """The keys as a user writes them, without the constant of a normalisation by it."""
        shown = {name: value for name, value in self.keys.items() if name not in ("kind", "normalisation_length")}
        return ", ".join([f"`{self.keys['kind']}`", *(f"`{name} = {_toml(value)}`" for name, value in shown.items())])


def _toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"{value:g}".replace("e+0", "e")


UNBIASED_LOSS = LossRow(
    {"kind": "aipo", "ratio_level": "sequence", "ratio_clip": 1e6, **_SUMS},
    "Never; but its variance grows with the ratio of the whole rollout, which nothing limits.",
)
"""The loss beside which advantages and selections are compared: it adds no bias at any staleness."""

UNBIASED_ADVANTAGE = "leave_one_out"
"""The advantage beside which losses and selections are compared."""

ADVANTAGES: dict[str, str] = {
    "leave_one_out": "Never.",
    "group_mean": "Never: `n` rollouts a group scale it by `(n - 1) / n`, alike for every example.",
    "turn_returns": "Never, with a discount of 1.",
    "anchor_states": "Never, with a discount of 1, if a state says nothing of what is sampled from it on.",
    "standardised": "Where rewards have more than two values or examples differ in difficulty, since those whose rewards differ "
    "little count more, whatever the size of the step.",
    "batch_standardised": "Where examples differ in difficulty: the rewards of one shift and scale those of the others.",
    "group_mean_batch_scaled": "In steps of few rollouts, since each of them moves the deviation that divides it.",
}
"""When the bias of each built-in advantage matters."""

LOSSES: tuple[LossRow, ...] = (
    UNBIASED_LOSS,
    LossRow(
        {"kind": "rloo", "clip_low": 1, "clip_high": 1e6},
        "Never with one advantage a rollout; those of turns are refused beside it.",
    ),
    LossRow(
        {"kind": "rloo"},
        "When stale, if the product of a rollout's ratios leaves the clip, which a long rollout's does soon.",
    ),
    LossRow(
        {"kind": "dr_grpo"},
        "When stale, if a ratio leaves the clip; and where a rollout decides more than once, since a token's own ratio does not "
        "correct what came before and comes after it.",
    ),
    LossRow(
        {"kind": "grpo"},
        "Where the number of tokens depends on what is decided, at any staleness and size of step, since each token of a long "
        "sample counts less; when stale, as `dr_grpo`.",
    ),
    LossRow(
        {"kind": "gspo"},
        "As `grpo`; when stale, the geometric mean of a sample's ratios is not the ratio of its probabilities.",
    ),
    LossRow({"kind": "sapo"}, "As `grpo`; when stale, the gate weighs the less, the farther the ratio is from 1."),
    LossRow(
        {"kind": "dapo"},
        "Where lengths differ and a step has few rollouts, since their number of tokens divides it; when stale, as `dr_grpo`.",
    ),
    LossRow({"kind": "reinforce_plus_plus"}, "As `dapo`."),
    LossRow({"kind": "reinforce_plus_plus_baseline"}, "As `dapo`."),
    LossRow(
        {"kind": "importance_ratio"},
        "As `dapo`, with limits in place of the clip; a token's own ratio does not correct the rest of its rollout.",
    ),
    LossRow({"kind": "cispo"}, "As `importance_ratio`, with a limit of 5."),
    LossRow({"kind": "aipo"}, "As `importance_ratio`, with a limit of 4."),
    LossRow({"kind": "ppo"}, "As `reinforce`: with one update a step its ratio is 1, so staleness goes uncorrected."),
    LossRow(
        {"kind": "reinforce"},
        "Where a step has few rollouts of different lengths; when stale at once: nothing corrects it.",
    ),
    LossRow({"kind": "dro"}, "As `reinforce`; when stale, the penalty pulls back to the policy that played."),
    LossRow(
        {"kind": "importance_ratio", "ratio_level": "sequence", **_SUMS},
        "When stale, if the product of a rollout's ratios leaves the limits.",
    ),
    LossRow(
        {"kind": "importance_ratio", **_SUMS},
        "When stale, where a rollout decides more than once, or beyond the limits.",
    ),
    LossRow(
        {"kind": "reinforce", "correction": "truncate", "correction_level": "sequence", **_SUMS},
        "When stale, if the product of a rollout's ratios is above `correction_high`, here 3.",
    ),
    LossRow(
        {"kind": "reinforce", "correction": "truncate", **_SUMS},
        "When stale, where a rollout decides more than once, or above `correction_high`.",
    ),
    LossRow(
        {"kind": "reinforce", "correction": "mask", "correction_level": "sequence", **_SUMS},
        "When stale, if the product of a rollout's ratios is above `correction_high`: such a rollout is lost.",
    ),
)
"""The loss without a bias, the built-in ones with their defaults, and variants."""

SELECTIONS: dict[Selection, tuple[str, str]] = {
    "all": ("all are trained", "Never."),
    "zero": (
        "`zero_advantage`, others in their place",
        "In groups of three or more, and steps of few rollouts: those at their group's mean are left out, so the divisor varies.",
    ),
    "cut": (
        "rollouts cut at the limit are [untrained](environments.md#untrained-tokens)",
        "Where being cut depends on what is decided: nothing then speaks for or against it.",
    ),
    "wait": (
        '`stragglers = "wait"`',
        "When stale, a little: a group is trained once its longest rollout has ended, on which the age of all its turns depends.",
    ),
    "drop": (
        '`stragglers = "drop"`',
        "From the length on at which groups are dropped, since what takes long is then never learned; below it as `wait`.",
    ),
}
"""The selections, as a user sets them, and when their bias matters."""
