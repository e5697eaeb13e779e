"""Trains several updates a step by TRL's loss, for `test_updates.py`: `python -m tests.trainer.trl_updates MODEL REFERENCE OUT`.

A process of its own, since TRL takes seconds to import and warns while it does. TRL's `num_iterations` trains every mini-batch of
a generation as often, with the log-probabilities of before the first update; here that is a loop over whole samples in float64,
by transformers' own forward pass and torch's SGD. `OUT` gets the weights and the losses of all updates.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from counterpoint.transport.records import Batch
from tests.trainer.plain_updates import PlainLoop, of_constant_advantages

BETA = 0.3
MINIBATCHES = EPOCHS = 2


def train(loop: PlainLoop, batch: Batch, losses: list[Tensor]) -> None:
    from tests.trainer.losses.cases import Trl
    from tests.trainer.losses.trl_losses import stand_in, trainers

    grpo, _ = trainers()
    samples = range(len(batch.samples))
    assert loop.reference is not None
    with torch.no_grad():
        old = [loop.of(loop.model, batch, sample)[0] for sample in samples]
        reference = [loop.of(loop.reference, batch, sample)[0] for sample in samples]
    for _ in range(EPOCHS):
        for first in range(MINIBATCHES):
            own = samples[first::MINIBATCHES]
            new = pad_sequence([loop.of(loop.model, batch, sample)[0] for sample in own], batch_first=True)
            mask = pad_sequence([torch.ones(len(old[sample])) for sample in own], batch_first=True)
            inputs = {
                "prompt_ids": torch.zeros(len(own), 1, dtype=torch.int64),
                "prompt_mask": torch.ones(len(own), 1, dtype=torch.int64),
                "completion_ids": torch.zeros_like(mask, dtype=torch.int64),
                "completion_mask": mask,
                "advantages": torch.stack([loop.given(batch, sample)[0] for sample in own]),
                "old_per_token_logps": pad_sequence([old[sample] for sample in own], batch_first=True),
                "ref_per_token_logps": pad_sequence([reference[sample] for sample in own], batch_first=True),
                "num_items_in_batch": mask.sum(),
            }
            trainer = stand_in(Trl({"beta": BETA}, ratio_to="old"), new, torch.zeros_like(new))
            losses.append(loop.update(grpo._compute_loss(trainer, None, inputs)))


def main(model: Path, reference: Path, out: Path) -> None:
    torch.set_num_threads(1)
    loop, losses = PlainLoop(model, reference), list[Tensor]()
    for number in (1, 2):
        train(loop, of_constant_advantages(number), losses)
    weights = {name: parameter.detach().clone() for name, parameter in loop.model.named_parameters()}
    save_file(weights | {"losses": torch.stack(losses)}, out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
