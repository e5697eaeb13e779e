"""The loss of on-policy distillation against the divergence itself, which autograd differentiates over the whole vocabulary."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from counterpoint.run.loss import LossConfig
from counterpoint.trainer.losses.contract import LossInputs
from counterpoint.trainer.losses.load import load_loss

VOCABULARY = 7


def inputs_of(trainer_P: Tensor, sampled_P: Tensor, teacher_P: Tensor | None, advantages_P: Tensor) -> LossInputs:
    count = len(trainer_P)
    return LossInputs(
        trainer_P,
        sampled_P,
        advantages_P,
        sample_P=torch.zeros(count, dtype=torch.int64),
        samples=1,
        entropies_P=torch.zeros(count),
        teacher_log_probabilities_P=teacher_P,
    )


def test_its_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Every token of the vocabulary is sampled once, and counts by its probability."""
    torch.manual_seed(0)
    logits_V = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True)
    teacher_V = torch.log_softmax(torch.randn(VOCABULARY, dtype=torch.float64), 0)
    policy_V = torch.log_softmax(logits_V, 0)
    (expected,) = torch.autograd.grad((policy_V.exp() * (policy_V - teacher_V)).sum(), logits_V, retain_graph=True)

    loss = load_loss(LossConfig(kind="distillation"))
    trainer_P = policy_V.detach().requires_grad_()
    outputs, gradients = loss(inputs_of(trainer_P, policy_V.detach(), teacher_V, torch.ones(VOCABULARY)))
    (found,) = torch.autograd.grad((policy_V * gradients.log_probabilities_P * policy_V.detach().exp()).sum(), logits_V)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    kl = (policy_V.exp() * (policy_V - teacher_V)).sum()
    estimate = (policy_V.detach().exp() * outputs.metrics_P["reverse_kl"]).sum()
    torch.testing.assert_close(estimate, kl.detach(), atol=1e-12, rtol=0)


def test_an_older_policy_is_corrected_for() -> None:
    """Sampled by another policy, the importance ratio gives the same expectation, up to the divergence's own p log p."""
    torch.manual_seed(1)
    logits_V = torch.randn(VOCABULARY, dtype=torch.float64, requires_grad=True)
    policy_V = torch.log_softmax(logits_V, 0)
    sampled_V = torch.log_softmax(logits_V.detach() + 0.1 * torch.randn(VOCABULARY, dtype=torch.float64), 0)
    teacher_V = torch.log_softmax(torch.randn(VOCABULARY, dtype=torch.float64), 0)
    (expected,) = torch.autograd.grad(-(policy_V.exp() * (teacher_V - sampled_V)).sum(), logits_V, retain_graph=True)
    trainer_P = policy_V.detach().requires_grad_()
    loss = load_loss(LossConfig(kind="distillation"))
    _, gradients = loss(inputs_of(trainer_P, sampled_V, teacher_V, torch.zeros(VOCABULARY)))
    (found,) = torch.autograd.grad((policy_V * gradients.log_probabilities_P * sampled_V.exp()).sum(), logits_V)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


def test_the_tasks_reward_is_mixed_in() -> None:
    trainer_P = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    sampled_P = torch.tensor([-1.0, -2.0, -4.0], dtype=torch.float64)  # the last ratio is 33: masked
    teacher_P = torch.tensor([-0.5, -3.0, -0.5], dtype=torch.float64)
    advantages_P = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    loss = load_loss(LossConfig(kind="distillation", reward_coefficient=0.25))
    outputs, gradients = loss(inputs_of(trainer_P, sampled_P, teacher_P, advantages_P), 3)
    expected = [-(0.25 + 0.5) / 3, -(0.5 - 1.0) / 3, 0.0]
    assert gradients.log_probabilities_P.tolist() == pytest.approx(expected)
    assert outputs.masked_P.tolist() == [False, False, True]
    assert loss.metrics == ("reverse_kl",)


def test_a_batch_without_a_teacher_is_refused() -> None:
    ones = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="no teacher_log_probabilities"):
        load_loss(LossConfig(kind="distillation"))(inputs_of(ones, ones.detach(), None, ones.detach()))
