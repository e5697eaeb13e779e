"""Configurations of built-in losses beside the settings of TRL 1.16 that compute the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.trainer.losses.tokens import LONGEST


@dataclass(frozen=True, slots=True)
class Trl:
    """Settings of TRL."""

    settings: dict[str, Any] = field(default_factory=dict)
    ratio_to: str = "inference"
    """What its "old" log-probabilities are."""
    correction: tuple[str, float | None, float] | None = None
    """`vllm_importance_sampling_mode`, and its lower and upper limits."""
    rloo: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One configuration of `[training.loss]`."""

    loss: dict[str, Any]
    trl: Trl
    spread: float = 0.4


_OLD = {"ratio_to": "old"}

CASES = {
    "grpo": Case({"kind": "grpo"}, Trl()),
    "grpo, clip-higher": Case({"kind": "grpo", "clip_high": 0.5}, Trl({"epsilon_high": 0.5})),
    "grpo, dual clip": Case({"kind": "grpo", "clip_dual": 1.4}, Trl({"delta": 1.4})),
    "grpo, ratio to the old weights": Case({"kind": "grpo", **_OLD}, Trl(ratio_to="old")),
    "bnpo": Case({"kind": "grpo", "normalisation": "token"}, Trl({"loss_type": "bnpo"})),
    "dr_grpo": Case({"kind": "dr_grpo", "normalisation_length": LONGEST}, Trl({"loss_type": "dr_grpo"})),
    "dapo": Case({"kind": "dapo"}, Trl({"loss_type": "dapo", "epsilon_high": 0.28})),
    "ppo": Case({"kind": "ppo"}, Trl({"loss_type": "bnpo"}, ratio_to="old")),
    "reinforce_plus_plus": Case({"kind": "reinforce_plus_plus"}, Trl({"loss_type": "bnpo"})),
    "reinforce_plus_plus_baseline": Case({"kind": "reinforce_plus_plus_baseline"}, Trl({"loss_type": "bnpo"})),
    "gspo": Case(
        {"kind": "gspo", "clip_low": 0.03, "clip_high": 0.04},
        Trl({"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}),
        spread=0.1,
    ),
    "luspo": Case(
        {"kind": "gspo", "clip_low": 0.03, "clip_high": 0.04, "normalisation": "sample", "normalisation_length": 1},
        Trl({"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04}),
        spread=0.1,
    ),
    "cispo": Case({"kind": "cispo", "ratio_clip": 1.2}, Trl({"loss_type": "cispo", "epsilon_high": 1.2})),
    "sapo": Case({"kind": "sapo"}, Trl({"loss_type": "sapo"})),
    "rloo": Case({"kind": "rloo"}, Trl(rloo=True), spread=0.15),
    "KL": Case({"kind": "grpo", "kl_coefficient": 0.3}, Trl({"beta": 0.3})),
    "KL, weighted by the ratio": Case(
        {"kind": "dapo", "kl_coefficient": 0.3, "kl_weighted": True},
        Trl({"loss_type": "dapo", "epsilon_high": 0.28, "beta": 0.3, "use_bias_correction_kl": True}),
    ),
    "KL, weighted by the sample's ratio": Case(
        {"kind": "gspo", "kl_coefficient": 0.3, "kl_weighted": True, "clip_low": 0.03, "clip_high": 0.04},
        Trl(
            {"importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04, "beta": 0.3}
            | {"use_bias_correction_kl": True}
        ),
        spread=0.1,
    ),
    "entropy": Case(
        {"kind": "dapo", "entropy_coefficient": 0.2},
        Trl({"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.2}),
    ),
} | {
    f"TIS and MIS, {mode}": Case(
        {"kind": "grpo", **_OLD, "kl_coefficient": 0.1, "correction": mode.split("_")[1]}
        | {"correction_level": mode.split("_")[0], "correction_low": 0.9, "correction_high": 1.2},
        Trl({"beta": 0.1}, ratio_to="old", correction=(mode, 0.9, 1.2)),
    )
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
}
