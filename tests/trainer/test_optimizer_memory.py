"""bfloat16 weights with float32 masters in 16 bytes a parameter, state in the host's memory; held against torch's optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from counterpoint.run.items import AdamW, UpdateValues
from counterpoint.run.trained import TrainingConfig
from counterpoint.trainer import optimizer as module
from counterpoint.trainer.optimizer import Optimizer, _halves, _joined
from counterpoint.trainer.updates.schedule import scheduled
from tests.support.live_bytes import LiveBytes

STEPS = 6
SHAPES = {"matrix": (9, 17), "vector": (11,), "scalar": ()}


def weights(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def gradients(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def configured(kind: str) -> TrainingConfig:
    momentum: dict[str, Any] = {"momentum": 0.7} if kind == "sgd" else {}
    return TrainingConfig(
        optimizer=kind, learning_rate=0.01, weight_decay=0.1, max_grad_norm=1.5, lr_schedule="linear", **momentum
    )


def values(kind: str, step: int) -> UpdateValues:
    return scheduled(configured(kind), STEPS, step)


def backward(parameters: dict[str, nn.Parameter], step: int, dtype: torch.dtype) -> None:
    """Two backward passes, whose gradients add up to some of which the norm is clipped."""
    for half in (step, step + 100):
        sum((parameters[name] * value).sum() for name, value in gradients(half, dtype).items()).backward()


def trained(dtype: torch.dtype, kind: str, **options: bool) -> Optimizer:
    optimizer = Optimizer(weights(dtype), configured(kind).optimizer, **options)
    for step in range(1, STEPS + 1):
        backward(optimizer.parameters, step, dtype)
        optimizer.step(optimizer.gradient_norm(), values(kind, step))
    return optimizer


def reference(dtype: torch.dtype, kind: str) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """torch's optimizer on float32 weights, with torch's clipping and the same gradients."""
    masters = {name: nn.Parameter(parameter.detach().float()) for name, parameter in weights(dtype).items()}
    groups = [
        {"params": [masters["matrix"]], "weight_decay": 0.1},
        {"params": [masters["vector"], masters["scalar"]], "weight_decay": 0.0},
    ]
    torch_kind: Any = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    optimizer = torch_kind(
        groups, **({"momentum": 0.7} if kind == "sgd" else {"betas": configured(kind).betas, "fused": True})
    )
    for step in range(1, STEPS + 1):
        for name, master in masters.items():
            master.grad = gradients(step, dtype)[name].float() + gradients(step + 100, dtype)[name].float()
        torch.nn.utils.clip_grad_norm_(list(masters.values()), 1.5)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 - (step - 1) / STEPS)
        optimizer.step()
    return masters, optimizer


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("piece", [64, 2**24])
def test_masters_and_moments_are_those_of_torch_bit_for_bit(
    kind: str, dtype: torch.dtype, offload: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    ours = trained(dtype, kind, offload=offload)
    masters, optimizer = reference(dtype, kind)
    state = ours.state()
    for name, master in masters.items():
        assert torch.equal(state[f"master.{name}"], master)
        for key, value in optimizer.state[master].items():
            assert torch.equal(state[f"{key}.{name}"], value), (key, name)
        error = (ours.parameters[name].detach().float() - master.detach()).abs()
        spacing = torch.exp2(torch.floor(torch.log2(master.detach().abs())) - 7)
        assert bool((error <= (spacing / 2 if dtype == torch.bfloat16 else 0 * spacing)).all())
    assert len(state) == sum(1 + len(each) for each in optimizer.state.values())


@pytest.mark.parametrize("to", [False, True])
def test_a_state_loads_with_offload_and_without(to: bool) -> None:
    former = trained(torch.bfloat16, "adamw", offload=not to)
    state = {name: tensor.clone() for name, tensor in former.state().items()}
    resumed = Optimizer(weights(torch.bfloat16), offload=to)
    resumed.load_state(state)
    for optimizer in (former, resumed):
        backward(optimizer.parameters, 50, torch.bfloat16)
        optimizer.step(optimizer.gradient_norm(), values("adamw", STEPS))
    own, theirs = resumed.state(), former.state()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    assert all(torch.equal(resumed.parameters[name], former.parameters[name]) for name in SHAPES)


@pytest.mark.slow
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=8))
@settings(max_examples=200)
def test_any_finite_master_survives_its_halves(patterns: list[int]) -> None:
    signed = [pattern - 2**32 if pattern >= 2**31 else pattern for pattern in patterns]
    master = torch.tensor(signed, dtype=torch.int32).view(torch.float32)
    weight, lower = _halves(master)
    assert torch.equal(_joined(weight, lower).view(torch.int32), master.view(torch.int32))
    finite = master.isfinite()
    rounded = master.bfloat16()
    # torch rounds halves to even, and this away from zero: the same distance.
    same = (weight.double() - master.double()).abs() == (rounded.double() - master.double()).abs()
    assert bool((same | ~finite | ~rounded.isfinite()).all())
    assert bool((weight.isnan() == master.isnan())[master.abs() <= 3e38].all())


def test_ties_are_rounded_away_from_zero_and_survive() -> None:
    """Torch rounds half of 1 + 2^-8 and the like up, and half down."""
    master = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, -1 - 3 * 2**-8, float("inf"), float("nan"), 0.0, -0.0])
    weight, lower = _halves(master)
    assert weight[:4].tolist() == [1 + 2**-7, 1 + 2**-6, -1 - 2**-7, -1 - 2**-6]
    assert torch.equal(_joined(weight, lower).view(torch.int32), master.view(torch.int32))
    assert weight.isnan().tolist() == [False] * 5 + [True] + [False] * 2


SIZE = 2**16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_takes_sixteen_bytes_a_parameter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted over backward passes and updates; beyond it there are only pieces, and one gradient while it is accumulated."""
    monkeypatch.setattr(module, "PIECE", 2**10)
    with LiveBytes() as live:
        parameters = {str(index): nn.Parameter(torch.zeros(SIZE, dtype=dtype)) for index in range(8)}
        optimizer = Optimizer(parameters)
        for _ in range(2):
            for parameter in parameters.values():
                parameter.sum().backward()  # its gradient is one number until it is accumulated
                parameter.sum().backward()
            norm = optimizer.gradient_norm()
            optimizer.step(norm, AdamW(1e-5))
        for parameter in parameters.values():
            parameter.sum().backward()
        assert 0 <= live.now - 8 * SIZE * 16 <= 8 * 64, "at rest, with gradients"
    transient = live.peak - 8 * SIZE * 16
    assert transient <= 2 * SIZE * 4 + 40 * 2**10


def test_offload_leaves_weights_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays where the weights are, when everything in the host's memory is on another device."""
    moved: list[int] = []

    def placed(_: Optimizer, tensor: Tensor) -> Tensor:
        moved.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(Optimizer, "_placed", placed)
    parameter = nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16))
    optimizer = Optimizer({"w": parameter}, offload=True)
    parameter.sum().backward()
    optimizer.step(optimizer.gradient_norm(), AdamW(1e-5))
    assert sum(moved) == SIZE * (2 + 8), "lower halves and moments are elsewhere"
