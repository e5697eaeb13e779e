"""The schedule's values, clipping, and what low precision must not lose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from counterpoint.run.items import AdamW, Sgd
from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer.optimizer import Optimizer
from counterpoint.trainer.updates.schedule import learning_rate, scheduled


def test_schedules() -> None:
    constant = TrainingConfig(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(constant, 10, step) for step in (1, 2, 4, 5, 10)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    linear = TrainingConfig(learning_rate=1.0, lr_schedule="linear", warmup_steps=2)
    assert [learning_rate(linear, 6, step) for step in range(1, 8)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = TrainingConfig(learning_rate=2.0, lr_schedule="cosine")
    assert learning_rate(cosine, 4, 1) == 2.0
    assert learning_rate(cosine, 4, 3) == pytest.approx(1.0)
    assert learning_rate(cosine, 4, 5) == pytest.approx(0.0)


def test_the_values_of_an_update_are_those_of_the_configuration() -> None:
    adamw = TrainingConfig(learning_rate=0.5, betas=(0.8, 0.7), weight_decay=0.1, max_grad_norm=3.0, warmup_steps=2)
    assert scheduled(adamw, 4, 1) == AdamW(0.25, (0.8, 0.7), 1e-8, decay=0.1, clip=3.0)
    assert scheduled(adamw, 4, 4, peak=2.0).rate == 2.0
    sgd = TrainingConfig(optimizer="sgd", learning_rate=0.5, momentum=0.6, weight_decay=0.1, max_grad_norm=3.0)
    assert scheduled(sgd, 4, 1) == Sgd(0.5, momentum=0.6, decay=0.1, clip=3.0)


def test_values_of_another_kind_are_refused_before_anything_changes() -> None:
    optimizer = Optimizer({"w": nn.Parameter(torch.zeros(2))}, "sgd")
    optimizer.parameters["w"].grad = torch.ones(2)
    with pytest.raises(TypeError, match=r"'adamw'.*'sgd'"):
        optimizer.step(optimizer.gradient_norm(), AdamW(1.0))
    assert optimizer.master("w").tolist() == [0.0, 0.0]
    assert optimizer.gradients()[0].tolist() == [1.0, 1.0]


def test_the_gradient_is_clipped_to_its_norm() -> None:
    def after(gradient: list[float]) -> torch.Tensor:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = Optimizer({"w": parameter})
        parameter.grad = torch.tensor(gradient)
        norm = optimizer.gradient_norm()
        optimizer.step(norm, AdamW(1e-5, clip=1.0))
        state = optimizer.state()
        return state["exp_avg.w"] / 0.1

    torch.testing.assert_close(after([3.0, 4.0]), torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(after([0.3, 0.4]), torch.tensor([0.3, 0.4]))


def test_bfloat16_weights_keep_small_updates_and_gradients() -> None:
    """256 updates of 1e-4 around 1.0, where bfloat16 steps by 8e-3: alone, it would never move."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = Optimizer({"w": parameter})
    for _ in range(256):
        (parameter.float().sum() * 256).backward()
        (parameter.float().sum() * 1).backward()
        assert optimizer.gradients()[0].tolist() == [257.0] * 4
        optimizer.step(optimizer.gradient_norm(), AdamW(1e-4))
    torch.testing.assert_close(optimizer.master("w"), torch.full((4,), 1 - 0.0256), rtol=1e-3, atol=0)
    assert parameter.tolist() == optimizer.master("w").bfloat16().tolist()


def test_state_of_another_model_is_refused() -> None:
    state = Optimizer({"w": nn.Parameter(torch.zeros(2))}).state()
    with pytest.raises(ValueError, match=r"weight w has shape \[2\]; this model has \[3\]"):
        Optimizer({"w": nn.Parameter(torch.zeros(3))}).load_state(state)
    with pytest.raises(ValueError, match="weight v is missing"):
        Optimizer({"v": nn.Parameter(torch.zeros(2))}).load_state(state)
    both = {name: nn.Parameter(torch.zeros(2)) for name in ("w", "v")}
    before = Optimizer({"w": nn.Parameter(torch.ones(2))})
    with pytest.raises(ValueError, match=r"trained weight v \(1 such\)"):
        before.load_state(Optimizer(both).state())
    assert before.master("w").tolist() == [1.0, 1.0]


def test_state_without_the_moments_of_one_weight_is_refused_before_anything_changes() -> None:
    def stepped(value: float) -> Optimizer:
        optimizer = Optimizer({name: nn.Parameter(torch.full((2,), value)) for name in "vw"})
        for parameter in optimizer.parameters.values():
            parameter.grad = torch.ones(2)
        optimizer.step(optimizer.gradient_norm(), AdamW(1e-5))
        return optimizer

    state, optimizer = stepped(1.0).state(), stepped(2.0)
    before = optimizer.master("v").clone()
    for wrong, said in (
        ({key: value for key, value in state.items() if key != "exp_avg_sq.w"}, "exp_avg_sq of weight w is missing"),
        (
            {key: value for key, value in state.items() if not key.endswith(".w") or "master" in key},
            "weight w is missing",
        ),
        (state | {"exp_avg.w": torch.zeros(3)}, r"exp_avg of weight w has shape \[3\]; expected \[2\]"),
    ):
        with pytest.raises(ValueError, match=said):
            optimizer.load_state(wrong)
    assert torch.equal(optimizer.master("v"), before)
    optimizer.load_state(state)
    assert torch.equal(optimizer.master("v"), state["master.v"])


def test_sgd_steps_against_the_gradient_with_its_momentum() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    values = Sgd(0.1, momentum=0.5, clip=10)
    optimizer = Optimizer({"w": parameter}, "sgd")
    for expected in (-0.1, -0.25):
        parameter.grad = torch.tensor([1.0, 0.0])
        optimizer.step(optimizer.gradient_norm(), values)
        torch.testing.assert_close(parameter.detach(), torch.tensor([expected, 0.0]))
    state = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    assert set(state) == {"master.w", "momentum_buffer.w"}
    resumed = Optimizer({"w": nn.Parameter(torch.zeros(2))}, "sgd")
    resumed.load_state(state)
    for each in (optimizer, resumed):
        each.parameters["w"].grad = torch.tensor([1.0, 0.0])
        each.step(each.gradient_norm(), values)
    assert torch.equal(resumed.master("w"), optimizer.master("w"))
    with pytest.raises(ValueError, match=r"momentum_buffer, .*training\.optimizer = 'adamw'"):
        Optimizer({"w": nn.Parameter(torch.zeros(2))}).load_state(state)


def test_sgd_without_momentum_keeps_nothing_but_the_weights() -> None:
    optimizer = Optimizer({"w": nn.Parameter(torch.zeros(2))}, "sgd")
    optimizer.parameters["w"].grad = torch.ones(2)
    optimizer.step(optimizer.gradient_norm(), Sgd(1e-5))
    assert set(optimizer.state()) == {"master.w"}
