"""Made-up trained tokens of a few samples, whose ratios are on both sides of every limit, and their padded form."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.trainer.losses.contract import LossInputs

OPTIONAL_INPUTS = tuple(name for name, value in LossInputs.__dataclass_fields__.items() if value.default is None)
"""Names of the inputs that only some runs have."""

LENGTHS = (3, 1, 7, 4, 6, 2)
LONGEST = 9
"""A completion's limit, for the losses that divide by it."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Samples end to end, float64 `[P]` each, without gradient."""

    trainer_P: Tensor
    inference_P: Tensor
    old_P: Tensor
    reference_P: Tensor
    entropies_P: Tensor
    advantages_P: Tensor
    lengths: tuple[int, ...] = LENGTHS

    @property
    def sample_P(self) -> Tensor:
        lengths_S = torch.tensor(self.lengths, device=self.trainer_P.device)
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=lengths_S.device), lengths_S)

    def inputs(self) -> LossInputs:
        """As a loss gets them, with all that is optional but values; new leaves for every call."""
        return LossInputs(
            self.trainer_P.clone().requires_grad_(),
            self.inference_P.clone(),
            self.advantages_P.clone(),
            sample_P=self.sample_P,
            samples=len(self.lengths),
            entropies_P=self.entropies_P.clone().requires_grad_(),
            old_log_probabilities_P=self.old_P.clone(),
            reference_log_probabilities_P=self.reference_P.clone(),
        )

    def padded(self, values_P: Tensor) -> Tensor:
        """`[samples, longest]`, zeros after each sample's last token."""
        return torch.nn.utils.rnn.pad_sequence(list(values_P.split(self.lengths)), batch_first=True)


def make_tokens(spread: float = 0.4) -> Tokens:
    """The same ones in every process; `spread` is the deviation of a token's log-ratio to the old policy."""
    generator = torch.Generator().manual_seed(7)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)

    trainer_P = -2.5 + normal(0.6)
    old_P = trainer_P - normal(spread)
    advantages_S = torch.tensor([1.3, -0.7, 0.4, -1.6, 0.9, -0.2], dtype=torch.float64)
    return Tokens(
        trainer_P,
        inference_P=old_P - normal(0.5 * spread),
        old_P=old_P,
        reference_P=trainer_P + normal(0.5),
        entropies_P=normal(1.0).abs(),
        advantages_P=torch.repeat_interleave(advantages_S, torch.tensor(LENGTHS)),
    )
