"""Runs that share rows: each is trained as if it were alone, and what is broken in one is in none of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from counterpoint.trainer.losses.contract import LossInputs, LossOutputs
from counterpoint.trainer.metrics import MetricValue
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.runs.run import Run
from counterpoint.trainer.work.step import finish
from counterpoint.transport.records import Batch
from tests.support.batches import with_changes
from tests.trainer.conftest import make_batch
from tests.trainer.many_runs import ALONE, STEPS, Bench, gradients

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

DENSE: dict[int, dict[str, Any]] = {
    0: {"rank": 4, "rate": 1e-3},
    2: {"rank": 3, "rate": 3e-3, "alpha": 4.0},
    5: {"rank": 8, "rate": 3e-4, "target_modules": ATTENTION},
}
"""Runs by slot."""
MIXTURE: dict[int, dict[str, Any]] = {
    0: {**DENSE[0], "target_modules": [*ATTENTION, "experts"]},
    2: {**DENSE[2], "target_modules": ["q_proj", "experts"]},
    5: DENSE[5],
}
LENGTHS = {0: (9, 17, 5, 12), 2: (21, 3, 8), 5: (7, 6, 30, 14, 4)}


@pytest.fixture(params=["dense", "moe"])
def kind(request: pytest.FixtureRequest) -> tuple[Path, dict[int, dict[str, Any]]]:
    """A model's directory and the runs to train on it."""
    path: Path = request.getfixturevalue(f"{request.param}_directory")
    return path, MIXTURE if request.param == "moe" else DENSE


def batch_of(bench: Bench, slot: int, step: int) -> Batch:
    """The batch of a step of the run in a slot. For a mixture it has routing, except in slot 2."""
    routed = bench.limits.layers > 0 and slot != 2
    return replace(make_batch(100 * slot + step, LENGTHS[slot], f"run-{slot}", routed), step=step)


def train_all(bench: Bench, runs: list[Run]) -> dict[int, list[dict[str, MetricValue]]]:
    """Trains `STEPS` steps of each run, side by side; the metrics by slot."""
    metrics: dict[int, list[dict[str, MetricValue]]] = {run.slot: [] for run in runs}
    for step in range(1, STEPS + 1):
        steps = [bench.open(run, batch_of(bench, run.slot, step)) for run in runs]
        for done, measured in bench.train_together(steps):
            metrics[done.run.slot].append(measured)
    return metrics


@pytest.mark.slow  # 120 optimizer steps
def test_a_run_beside_others_is_the_run_alone(kind: tuple[Path, dict[int, dict[str, Any]]]) -> None:
    directory, settings = kind
    bench = Bench(directory)
    together = train_all(bench, [bench.admit(slot, **given) for slot, given in settings.items()])
    for slot, given in settings.items():
        solitary = Bench(directory)
        run = solitary.admit(slot, **given)
        initial = copies(solitary, slot)
        alone = train_all(solitary, [run])[slot]
        final = copies(solitary, slot)
        assert max(float((final[name] - initial[name]).abs().max()) for name in final) > 1e-3
        for name, parameter in copies(bench, slot).items():
            torch.testing.assert_close(parameter, final[name], rtol=0, atol=1e-5)
        for ours, theirs in zip(together[slot], alone, strict=True):
            assert ours.keys() == theirs.keys()
            for name in ours.keys() - {"phase/train", "tokens_per_second"}:
                assert ours[name] == pytest.approx(theirs[name], abs=1e-5, rel=1e-5), (slot, name)


def copies(bench: Bench, slot: int) -> dict[str, Tensor]:
    """The parameters of a slot as they are now."""
    return {name: parameter.detach().clone() for name, parameter in bench.parameters(slot).items()}


def raises(inputs: LossInputs) -> LossOutputs:
    raise ZeroDivisionError("no advantages")


class Odd(BaseException):
    """As test frameworks and schedulers have them: no `Exception`."""


def raises_no_exception(inputs: LossInputs) -> LossOutputs:
    raise Odd("of its own")


def raises_in_its_gradient(inputs: LossInputs) -> LossOutputs:
    class Stubborn(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values_P: Tensor) -> Tensor:
            return values_P.clone()

        @staticmethod
        def backward(ctx: Any, gradient_P: Tensor) -> Tensor:
            raise ZeroDivisionError("no gradient")

    return outputs(Stubborn.apply(inputs.trainer_log_probabilities_P))


def outputs(loss_P: Tensor) -> LossOutputs:
    return LossOutputs(loss_P, torch.zeros_like(loss_P, dtype=torch.bool))


def not_a_number(inputs: LossInputs) -> LossOutputs:
    return outputs(inputs.trainer_log_probabilities_P * torch.nan)


def infinite(inputs: LossInputs) -> LossOutputs:
    return outputs(inputs.trainer_log_probabilities_P * torch.inf)


def one_number(inputs: LossInputs) -> LossOutputs:
    return outputs(inputs.trainer_log_probabilities_P.sum())


def constant(inputs: LossInputs) -> LossOutputs:
    return outputs(inputs.advantages_P)


def overwrites_its_inputs(inputs: LossInputs) -> LossOutputs:
    inputs.advantages_P.fill_(torch.nan)
    inputs.inference_log_probabilities_P.fill_(torch.nan)
    inputs.trainer_log_probabilities_P.data.fill_(torch.nan)
    return outputs(inputs.trainer_log_probabilities_P * 1.0)


LOSSES: dict[Callable[[LossInputs], LossOutputs], str] = {
    raises: r"the loss of step 1 raised ZeroDivisionError: no advantages \(in raises, .*test_many_runs",
    raises_no_exception: "the loss of step 1 raised Odd: of its own",
    raises_in_its_gradient: "the loss of step 1 raised ZeroDivisionError: no gradient",
    one_number: r"the loss of step 1 raised ValueError: loss_P has shape \[\]; expected \[\d+\]",
    constant: "the loss of step 1 raised ValueError: loss_P does not depend on trainer_log_probabilities_P",
    not_a_number: "the loss of step 1 is not finite",
    infinite: "the loss of step 1 is not finite",
    overwrites_its_inputs: "the loss of step 1 is not finite",
}


def train_rows(bench: Bench, first: Run, others: list[Run], **changed: Any) -> tuple[Any, list[dict[str, Tensor]]]:
    """Two rows that the runs share: the open step of the first, on a batch with `changed` columns, and the others' gradients."""
    steps = [bench.open(first, with_changes(batch_of(bench, first.slot, 1), **changed))]
    steps += [bench.open(run, batch_of(bench, run.slot, 1)) for run in others]
    for half in (slice(0, 1), slice(1, 2)):
        bench.train([(step, step.samples[half]) for step in steps])
    return steps[0], [gradients(run) for run in others]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_broken_loss_is_its_own_runs_alone(
    kind: tuple[Path, dict[int, dict[str, Any]]], loss: Callable[[LossInputs], LossOutputs]
) -> None:
    directory, settings = kind
    bench = Bench(directory, max_tokens=200)
    expected = train_rows(bench, *admit_all(bench, settings))[1]
    bench = Bench(directory, max_tokens=200)
    first, others = admit_all(bench, settings, loss)
    before = copies(bench, first.slot)
    step, found = train_rows(bench, first, others)
    assert_equal(found, expected)
    with pytest.raises(InvalidBatch, match=LOSSES[loss]):
        finish([step], ALONE, step.run.scheduled())
    assert_equal([copies(bench, first.slot)], [before])
    assert gradients(first) == {}
    assert first.progress.step == 0


def test_values_that_are_not_finite_stay_in_their_run(kind: tuple[Path, dict[int, dict[str, Any]]]) -> None:
    directory, settings = kind
    bench = Bench(directory, max_tokens=200)
    expected = train_rows(bench, *admit_all(bench, settings))[1]
    bench = Bench(directory, max_tokens=200)
    first, others = admit_all(bench, settings)
    advantages = np.full_like(batch_of(bench, first.slot, 1).advantages_T, np.nan)
    assert_equal(train_rows(bench, first, others, advantages_T=advantages)[1], expected)
    for run in others:
        run.torch.optimizer.zero_grad()
    with torch.no_grad():
        for parameter in bench.parameters(first.slot).values():
            parameter.fill_(torch.nan)
    step, found = train_rows(bench, first, others)
    for ours, theirs in zip(found, expected, strict=True):
        # Not to the last bit: a gate sends what is no number to other experts, whose products then have other sizes.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with pytest.raises(InvalidBatch, match="the loss of step 1 is not finite"):
        finish([step], ALONE, step.run.scheduled())


def admit_all(bench: Bench, settings: dict[int, dict[str, Any]], loss: Any = None) -> tuple[Run, list[Run]]:
    """The run in slot 2, with this loss, and the others on either side of it."""
    first = bench.admit(2, loss, **settings[2])
    return first, [bench.admit(slot, **settings[slot]) for slot in (0, 5)]


def assert_equal(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    """To the last bit, and that there is something."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert max(float(tensor.abs().max()) for tensor in theirs.values()) > 1e-3
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), name
