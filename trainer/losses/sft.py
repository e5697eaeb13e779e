"""Supervised fine-tuning: the negative log-likelihood of tokens that `counterpoint sft` takes from data (docs/sft.md).

Its mean over the trained tokens of a step is the cross entropy that Hugging Face's and TRL's trainers minimise
(`ForCausalLMLoss` with `num_items_in_batch`).
"""

from __future__ import annotations

import torch

from trainer.losses.contract import LossInputs, LossOutputs


def sft(inputs: LossInputs) -> LossOutputs:
    """Computes -log p of each token."""
    return LossOutputs(
        loss_P=-inputs.trainer_log_probabilities_P,
        masked_P=torch.zeros_like(inputs.trainer_log_probabilities_P, dtype=torch.bool),
    )
