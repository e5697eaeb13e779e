"""Supervised fine-tuning: the negative log-likelihood of tokens that `counterpoint sft` takes from data (docs/sft.md).

Its mean over the trained tokens of a step is the cross entropy that Hugging Face's and TRL's trainers minimise
(`ForCausalLMLoss` with `num_items_in_batch`).
"""

from __future__ import annotations

from run.loss import LossConfig
from trainer.losses.contract import LossInputs, LossOutputs
from trainer.losses.objectives import likelihood
from trainer.losses.policy_gradient import policy_gradient


def sft(inputs: LossInputs, config: LossConfig) -> LossOutputs:
    """Computes -log p of each token."""
    return policy_gradient(inputs, config, likelihood)
