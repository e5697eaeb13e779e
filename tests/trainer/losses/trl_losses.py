"""Prints what TRL's own `_compute_loss` gives for `cases.CASES`: a loss and its gradients for each, as JSON.

A process of its own, since TRL takes seconds to import and warns while it does. `_compute_loss` is called on a stand-in for the
trainer, which has the attributes that it reads, and returns log-probabilities and entropies of `tokens.make_tokens` in place of
a model's. The inputs that TRL's generation would prepare are prepared here.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.trainer.losses.cases import CASES, Trl
from tests.trainer.losses.tokens import LONGEST, Tokens, make_tokens

DEFAULTS: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "entropy_coef": 0.0,
}
ARGUMENTS: dict[str, Any] = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "steps_per_generation": 1,
}


def trainers() -> tuple[Any, Any]:
    """TRL's classes for GRPO and RLOO, imported as where vLLM and trackers are not installed: `_compute_loss` needs none."""
    sys.modules.update(dict.fromkeys(("vllm", "wandb", "trackio")))  # type: ignore[arg-type]
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.rloo_trainer import RLOOTrainer

    return GRPOTrainer, RLOOTrainer


class Accelerator:
    """The part of accelerate's class that TRL reads, in one process."""

    num_processes = 1
    sync_gradients = False

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str) -> Tensor:
        return values


def stand_in(case: Trl, log_probabilities: Tensor, entropies: Tensor) -> SimpleNamespace:
    attributes = DEFAULTS | {name: value for name, value in case.settings.items() if name not in ARGUMENTS}
    return SimpleNamespace(
        **attributes,
        args=SimpleNamespace(**ARGUMENTS | {n: v for n, v in case.settings.items() if n in ARGUMENTS}),
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        use_vllm=case.correction is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=bool(attributes["entropy_coef"]),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_args, **_kwargs: (log_probabilities, entropies, None),
    )


def correction(tokens: Tokens, mode: str, low: float | None, high: float) -> Tensor:
    """TRL's `vllm_importance_sampling_mode`, sample by sample, as its documentation says; padded."""
    level, limit = mode.split("_")
    rows = []
    for old, inference in zip(
        tokens.old_P.split(tokens.lengths), tokens.inference_P.split(tokens.lengths), strict=True
    ):
        logarithms = [(a - b).item() for a, b in zip(old, inference, strict=True)]
        if level == "sequence":
            logarithms = [sum(logarithms)] * len(logarithms)
        ratios = [torch.tensor(value, dtype=torch.float64).exp().item() for value in logarithms]
        if limit == "truncate":
            ratios = [min(max(value, low or 0.0), high) for value in ratios]
        else:
            ratios = [value if (low or 0.0) <= value <= high else 0.0 for value in ratios]
        rows.append(torch.tensor(ratios, dtype=torch.float64))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def result(case: Trl, tokens: Tokens) -> dict[str, Any]:
    trainer_P, entropies_P = tokens.trainer_P.clone().requires_grad_(), tokens.entropies_P.clone().requires_grad_()
    mask = tokens.padded(torch.ones_like(tokens.trainer_P))
    before = tokens.padded(tokens.old_P if case.ratio_to == "old" else tokens.inference_P)
    inputs = {
        "prompt_ids": torch.zeros(len(tokens.lengths), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(tokens.lengths), 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(mask, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": torch.stack([values[0] for values in tokens.advantages_P.split(tokens.lengths)]),
        "old_per_token_logps": before,
        "old_logps": before.sum(1),
        "ref_per_token_logps": tokens.padded(tokens.reference_P),
        "num_items_in_batch": mask.sum(),
    }
    if case.correction is not None:
        inputs["importance_sampling_ratio"] = correction(tokens, *case.correction)
    grpo, rloo = trainers()
    compute_loss = rloo._compute_loss if case.rloo else grpo._compute_loss
    loss = compute_loss(stand_in(case, tokens.padded(trainer_P), tokens.padded(entropies_P)), None, inputs)
    by_log_probabilities, by_entropies = torch.autograd.grad(loss, [trainer_P, entropies_P], allow_unused=True)
    return {
        "loss": loss.item(),
        "by_log_probabilities": by_log_probabilities.tolist(),
        "by_entropies": None if by_entropies is None else by_entropies.tolist(),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: result(case.trl, make_tokens(case.spread)) for name, case in CASES.items()}))
