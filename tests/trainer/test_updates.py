"""What is computed around the loss, against plain loops: reference policy, several updates of a step, value head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from run.updates import ValueHeadConfig
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import LoneRun, make_lone_run
from trainer.losses.contract import LossInputs, LossOutputs
from transport.records import Batch

RATE = 0.05
CLIP = 0.2
BETA = 0.3


def clipped(inputs: LossInputs) -> LossOutputs:
    """PPO's policy loss with k3 of the reference: needs what this file is about."""
    old_P = inputs.old_log_probabilities_P
    new_P = inputs.trainer_log_probabilities_P
    ratio_P = (new_P - (new_P.detach() if old_P is None else old_P)).exp()
    loss_P = -torch.minimum(ratio_P * inputs.advantages_P, ratio_P.clamp(1 - CLIP, 1 + CLIP) * inputs.advantages_P)
    if inputs.reference_log_probabilities_P is not None:
        distance_P = inputs.reference_log_probabilities_P - new_P
        loss_P = loss_P + BETA * (distance_P.exp() - 1 - distance_P)
    return LossOutputs(loss_P, torch.zeros_like(loss_P, dtype=torch.bool))


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
                span = slice(*batch.sample_offsets[sample : sample + 2])
                given = batch.advantages_T[span][batch.loss_mask_T[span] == 1]
                advantages[sample] = torch.from_numpy(given.astype(np.float64))
                cost = penalty * (old[sample] - reference[sample]) if penalty else torch.zeros_like(old[sample])
                advantages[sample] = advantages[sample] - cost
                if self.head is not None:
                    advantages[sample] = plain_gae(
                        self.head, values[sample].tolist(), (-cost).tolist(), batch.samples[sample].reward
                    )
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
                self.optimizer.zero_grad()
                (loss / count).backward()
                self.norms.append(float(torch.nn.utils.clip_grad_norm_(self.trained, 1e9)))
                self.optimizer.step()


def plain_gae(head: ValueHeadConfig, values: list[float], rewards: list[float], reward: float) -> Tensor:
    """By the definition: the discounted sum of all later errors of one step."""
    rewards = [*rewards[:-1], rewards[-1] + reward]
    following = [*values[1:], 0.0]
    errors = [r + head.discount * after - v for r, after, v in zip(rewards, following, values, strict=True)]
    decay = head.discount * head.gae_lambda
    return torch.tensor(
        [sum(decay**k * error for k, error in enumerate(errors[token:])) for token in range(len(errors))],
        dtype=torch.float64,
    )


def lone(directory: Path, output: Path, **training: Any) -> LoneRun:
    """Trained by plain SGD, with a few samples in a row."""
    settings: dict[str, Any] = {"optimizer": "sgd", "learning_rate": RATE, "max_grad_norm": 1e9}
    settings |= {"loss": {"kind": f"{__name__}:clipped"}} | training
    return make_lone_run(output, directory, {"max_tokens": 24}, **settings)


def distance(run: LoneRun, plain: PlainLoop) -> float:
    """The largest difference of a weight."""
    named = dict(plain.model.named_parameters())
    named |= {"value_head.weight": plain.linear.weight, "value_head.bias": plain.linear.bias}
    return max(float((value.double() - named[name].detach()).abs().max()) for name, value in run.weights().items())


@pytest.fixture(scope="module")
def other_directory(dense_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    model = AutoModelForCausalLM.from_pretrained(dense_directory)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    directory = tmp_path_factory.mktemp("other")
    model.save_pretrained(directory)
    return directory


CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "several updates": ({}, 2, 1),
    "several epochs": ({}, 1, 3),
    "mini-batches and epochs": ({}, 2, 2),
    "reference in the loss": ({"reference": True}, 1, 1),
    "reference in the reward": ({"reference": True, "penalty": 0.4}, 1, 1),
    "reference, several updates": ({"reference": True}, 2, 1),
    "value head": ({"head": {"gae_lambda": 0.9, "discount": 0.97}}, 1, 1),
    "value head, unwhitened": ({"head": {"whiten": False, "coefficient": 0.5, "clip": 0.05}}, 2, 2),
    "all": ({"reference": True, "penalty": 0.4, "head": {}}, 2, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_a_plain_loop(
    dense_directory: Path, other_directory: Path, tmp_path: Path, case: str
) -> None:
    settings, minibatches, epochs = CASES[case]
    head = ValueHeadConfig.model_validate(settings["head"]) if "head" in settings else None
    penalty = settings.get("penalty", 0.0)
    training: dict[str, Any] = {"updates_per_step": minibatches * epochs, "epochs": epochs}
    if "reference" in settings:
        training["reference"] = {"model": str(other_directory), "reward_coefficient": penalty}
        if penalty:
            training["loss"] = {"kind": f"{__name__}:clipped_alone"}
    if head is not None:
        training |= {"value_head": settings["head"]}
    run = lone(dense_directory, tmp_path, **training)
    plain = PlainLoop(dense_directory, other_directory if "reference" in settings else None, head)
    for number in (1, 2):
        batch = make_batch(number)
        metrics = run.train(batch)
        plain.step(batch, minibatches, epochs, penalty)
        norms = plain.norms[-minibatches * epochs :]
        assert metrics["grad_norm"] == pytest.approx(sum(norms) / len(norms), rel=1e-5)
        assert metrics["tokens/trained"] == int(batch.loss_mask_T.sum())
    assert distance(run, plain) < 1e-5
    assert distance(run, PlainLoop(dense_directory)) > 1e-3, "something was learnt"
    assert run.run.held is None


def clipped_alone(inputs: LossInputs) -> LossOutputs:
    """Without the reference, which is in the reward."""
    return clipped(
        LossInputs(
            inputs.trainer_log_probabilities_P,
            inputs.inference_log_probabilities_P,
            inputs.advantages_P,
            inputs.sample_P,
            inputs.samples,
            inputs.entropies_P,
            inputs.old_log_probabilities_P,
        )
    )
