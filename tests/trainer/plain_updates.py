"""Steps as plain loops over whole samples in float64: what `test_updates.py` and `trl_updates.py` compare the trainer to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from counterpoint.run.updates import ValueHeadConfig
from counterpoint.transport.records import Batch
from tests.support.batches import with_changes
from tests.trainer.conftest import make_batch

RATE = 0.05
CLIP = 0.2
BETA = 0.3


def of_constant_advantages(number: int) -> Batch:
    """A batch each of whose samples has one advantage."""
    batch = make_batch(number)
    own_S = np.random.default_rng(100 + number).standard_normal(len(batch.samples))
    advantages_T = np.repeat(own_S, np.diff(batch.sample_offsets)) * batch.loss_mask_T
    return with_changes(batch, advantages_T=advantages_T.astype(np.float32))


class PlainLoop:
    """The same training as one loop over whole samples in float64, by transformers' own forward pass and torch's SGD."""

    def __init__(self, directory: Path, reference: Path | None = None, head: ValueHeadConfig | None = None) -> None:
        self.model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        self.reference: nn.Module | None = (
            None if reference is None else AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float64)
        )
        self.head = head
        self.linear = nn.Linear(self.model.config.hidden_size, 1, dtype=torch.float64)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        trained = [*self.model.parameters(), *(self.linear.parameters() if head else ())]
        self.optimizer = torch.optim.SGD(trained, lr=RATE)
        self.trained = trained
        self.norms: list[float] = []

    def of(self, model: nn.Module, batch: Batch, sample: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities and values of a sample's trained tokens."""
        span = slice(*batch.sample_offsets[sample : sample + 2])
        tokens = torch.from_numpy(batch.token_ids_T[span]).long()
        mask = torch.from_numpy(batch.loss_mask_T[span][1:]).bool()
        output = model(input_ids=tokens[None], use_cache=False, output_hidden_states=True)
        logits = output.logits[0][:-1] / batch.samples[sample].temperature
        chosen = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0][mask]
        return chosen, self.linear(output.hidden_states[-1][0][:-1])[:, 0][mask]

    def given(self, batch: Batch, sample: int) -> Tensor:
        """Advantages of a sample's trained tokens, as sent."""
        span = slice(*batch.sample_offsets[sample : sample + 2])
        return torch.from_numpy(batch.advantages_T[span][batch.loss_mask_T[span] == 1].astype(np.float64))

    def update(self, loss: Tensor) -> Tensor:
        """One update; returns the loss."""
        self.optimizer.zero_grad()
        loss.backward()
        self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.trained, 1e9)))
        self.optimizer.step()
        return loss.detach()

    def step(self, batch: Batch, minibatches: int, epochs: int, penalty: float = 0.0) -> None:
        samples = range(len(batch.samples))
        old: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        reference: dict[int, Tensor] = {}
        advantages: dict[int, Tensor] = {}
        returns: dict[int, Tensor] = {}
        with torch.no_grad():
            for sample in samples:
                old[sample], values[sample] = self.of(self.model, batch, sample)
                if self.reference is not None:
                    reference[sample], _ = self.of(self.reference, batch, sample)
                advantages[sample] = self.given(batch, sample)
                cost = penalty * (old[sample] - reference[sample]) if penalty else torch.zeros_like(old[sample])
                advantages[sample] = advantages[sample] - cost
                if self.head is not None:
                    received = rewards_of(batch, sample) - cost
                    advantages[sample] = plain_gae(self.head, values[sample].tolist(), received.tolist())
                    returns[sample] = advantages[sample] + values[sample]
            if self.head is not None and self.head.whiten:
                every = torch.cat(list(advantages.values()))
                mean, deviation = every.mean(), (every.var() + 1e-8).sqrt()
                advantages = {sample: (own - mean) / deviation for sample, own in advantages.items()}
        for _ in range(epochs):
            for first in range(minibatches):
                loss, count = torch.zeros((), dtype=torch.float64), 0
                for sample in samples[first::minibatches]:
                    new, estimates = self.of(self.model, batch, sample)
                    ratio, own = (new - old[sample]).exp(), advantages[sample]
                    policy = -torch.minimum(ratio * own, ratio.clamp(1 - CLIP, 1 + CLIP) * own)
                    if self.reference is not None and not penalty:
                        distance = reference[sample] - new
                        policy = policy + BETA * (distance.exp() - 1 - distance)
                    loss, count = loss + policy.sum(), count + len(new)
                    if self.head is not None:
                        near = values[sample] + (estimates - values[sample]).clamp(-self.head.clip, self.head.clip)
                        errors = torch.maximum((estimates - returns[sample]) ** 2, (near - returns[sample]) ** 2)
                        loss = loss + self.head.coefficient * 0.5 * errors.sum()
                self.update(loss / count)


def rewards_of(batch: Batch, sample: int) -> Tensor:
    """What is given for each trained token: the rewards of turns, or the sample's for its last one."""
    place = slice(int(batch.sample_offsets[sample]), int(batch.sample_offsets[sample + 1]))
    trained = batch.loss_mask_T[place] == 1
    if "rewards" in batch.columns:
        return torch.from_numpy(batch.columns["rewards"][place][trained].astype(np.float64))
    return torch.tensor([0.0] * (int(trained.sum()) - 1) + [batch.samples[sample].reward], dtype=torch.float64)


def plain_gae(head: ValueHeadConfig, values: list[float], rewards: list[float]) -> Tensor:
    """By the definition: the discounted sum of all later errors of one step."""
    following = [*values[1:], 0.0]
    errors = [r + head.discount * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    decay = head.discount * head.gae_lambda
    return torch.tensor(
        [sum(decay**k * error for k, error in enumerate(errors[token:])) for token in range(len(errors))],
        dtype=torch.float64,
    )
