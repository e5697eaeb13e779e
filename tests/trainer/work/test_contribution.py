"""Several contributions to one update: their gradients add up, each with a loss of its own, and their results come back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from counterpoint.run.items import AdamW, Objective
from counterpoint.trainer import rows
from counterpoint.trainer.losses.contract import LossInputs, LossOutputs
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.work import batch_parts
from counterpoint.trainer.work.contribution import Contribution, StepOutcome
from counterpoint.transport.records import Batch
from tests.trainer.conftest import VOCABULARY, make_batch
from tests.trainer.lone_run import LoneRun, make_lone_run

LORA = {"rank": 2, "target_modules": ["q_proj", "down_proj"]}
SUMMED = Objective(loss={"kind": "sft"}, divisor=1.0, returns=True)


@pytest.fixture
def lone(dense_directory: Path, tmp_path: Path) -> LoneRun:
    return make_lone_run(tmp_path, dense_directory, lora=LORA)


def contribute(lone: LoneRun, batch: Batch, objective: Objective | None = None) -> StepOutcome:
    """Trained row by row, one sample a row."""
    step = lone.learner.open_step(0, batch, objective)
    for sample in step.samples:
        lone.learner.train_rows([[(0, [sample])]])
    return lone.learner.conclude(0)


def gradients(lone: LoneRun) -> list[torch.Tensor]:
    return [each.clone() for each in lone.run.torch.optimizer.gradients()]


def update(lone: LoneRun) -> dict[str, Any]:
    return dict(lone.learner.finish_step(0, AdamW(1e-3)))


def with_all_tokens(batch: Batch) -> Batch:
    """Another batch of the same step."""
    other = make_batch(batch.step + 50)
    return replace(other, step=batch.step)


def test_gradients_of_contributions_add_up_and_are_dropped_by_the_update(lone: LoneRun) -> None:
    first, second = make_batch(1), with_all_tokens(make_batch(1))
    alone = []
    for batch in (first, second):
        contribute(lone, batch, SUMMED)
        alone.append(gradients(lone))
        lone.learner.drop_step(0)
    for batch in (first, second):
        contribute(lone, batch, SUMMED)
    for together, one, other in zip(gradients(lone), *alone, strict=True):
        torch.testing.assert_close(together, one + other)
    metrics = update(lone)
    assert metrics["tokens"] == len(first.token_ids_T) + len(second.token_ids_T)
    assert metrics["tokens/trained"] == int(first.loss_mask_T.sum() + second.loss_mask_T.sum())
    assert lone.run.progress.step == 1
    assert not any(each.any() for each in gradients(lone))


def test_results_are_those_of_a_plain_computation(lone: LoneRun) -> None:
    batch = make_batch(1)
    random = np.random.default_rng(0)
    weights = random.uniform(0.5, 2.0, len(batch.token_ids_T)).astype(np.float32)
    targets = random.integers(0, VOCABULARY, len(batch.token_ids_T), dtype=np.int32)
    objective = Objective({"kind": "sft"}, 2.0, weights.tobytes(), targets.tobytes(), returns=True)
    outcome = contribute(lone, batch, objective)
    log_probabilities, losses = outcome.columns["log_probabilities"], outcome.columns["losses"]
    for index, info in enumerate(batch.samples):
        span = slice(int(batch.sample_offsets[index]), int(batch.sample_offsets[index + 1]))
        with torch.no_grad():
            logits = lone.model(torch.from_numpy(batch.token_ids_T[span].astype(np.int64))[None]).logits[0]
        table = torch.log_softmax(logits / info.temperature, -1)[:-1]
        expected = table.gather(1, torch.from_numpy(targets[span].astype(np.int64))[1:, None])[:, 0].numpy()
        mask = batch.loss_mask_T[span].astype(bool)
        np.testing.assert_allclose(log_probabilities[span][mask], expected[mask[1:]], rtol=1e-4, atol=1e-5)
    mask = batch.loss_mask_T.astype(bool)
    np.testing.assert_allclose(losses[mask], -log_probabilities[mask] * weights[mask], rtol=1e-6)
    assert not log_probabilities[~mask].any()
    assert not losses[~mask].any()
    assert outcome.metrics["loss"] == pytest.approx(losses.sum() / 2.0)


def test_a_divisor_and_weights_scale_the_gradient(lone: LoneRun) -> None:
    batch = make_batch(1)
    contribute(lone, batch, SUMMED)
    expected = gradients(lone)
    lone.learner.drop_step(0)
    doubled = np.full(len(batch.token_ids_T), 2.0, np.float32).tobytes()
    contribute(lone, batch, Objective({"kind": "sft"}, divisor=2.0, weights=doubled))
    for found, given in zip(gradients(lone), expected, strict=True):
        torch.testing.assert_close(found, given)


def test_a_row_that_fails_has_earlier_contributions_trained_again(
    lone: LoneRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients of the first are dropped with those of the row, and come back without being counted twice."""
    first, second = make_batch(1), with_all_tokens(make_batch(1))
    for batch in (first, second):
        contribute(lone, batch, SUMMED)
    expected = gradients(lone)
    lone.learner.drop_step(0)
    attempt, failed = rows._attempt, list[int]()

    def fails_once(piece: Any, train_row: Any) -> Any:
        found = attempt(piece, train_row)
        if piece and piece[0][0].batch is second and not failed:
            failed.append(1)
            return rows._Failure("out of memory", out_of_memory=True)
        return found

    contribute(lone, first, SUMMED)
    monkeypatch.setattr(rows, "_attempt", fails_once)
    step = lone.learner.open_step(0, second, SUMMED)
    lone.learner.train_rows([[(0, step.samples[:2])]])
    lone.learner.train_rows([[(0, step.samples[2:])]])
    lone.learner.conclude(0)
    assert failed
    for found, given in zip(gradients(lone), expected, strict=True):
        torch.testing.assert_close(found, given)
    assert update(lone)["tokens/trained"] == int(first.loss_mask_T.sum() + second.loss_mask_T.sum())


def test_a_contribution_that_fails_drops_all_since_the_last_update(lone: LoneRun) -> None:
    def broken(inputs: LossInputs) -> LossOutputs:
        raise ZeroDivisionError

    contribute(lone, make_batch(1), SUMMED)
    step = lone.learner.open_step(0, make_batch(1), SUMMED)
    step.loss = replace(step.loss, function=broken)
    lone.learner.train_rows([[(0, step.samples)]])
    with pytest.raises(InvalidBatch, match="ZeroDivisionError"):
        lone.learner.conclude(0)
    assert not lone.learner.contributions.get(0)
    assert not any(each.any() for each in gradients(lone))


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        (Objective(divisor=0.0), r"divisor = 0\.0"),
        (Objective(divisor=float("nan")), "divisor = nan"),
        (Objective(weights=b"1234"), "weights has 4 bytes"),
        (Objective(weights=np.full(43, np.nan, np.float32).tobytes()), "weights"),
        (Objective(targets=np.full(43, VOCABULARY, np.int32).tobytes()), f"targets .*{VOCABULARY}"),
        (Objective(targets=np.full(43, -1, np.int32).tobytes()), f"targets .*{VOCABULARY}"),
        (Objective({"kind": "os:system"}), "os:system"),
        (Objective({"kind": "nothing"}), "nothing"),
    ],
)
def test_what_does_not_fit_is_refused_with_nothing_begun(lone: LoneRun, objective: Objective, said: str) -> None:
    batch = make_batch(1)
    assert len(batch.token_ids_T) == 43
    with pytest.raises(InvalidBatch, match=said):
        lone.learner.open_step(0, batch, objective)
    assert not lone.learner.contributions.get(0)


@pytest.mark.parametrize("first_is_trained", [True, False])
def test_a_contribution_without_a_trained_token_changes_nothing_beside_another(
    lone: LoneRun, first_is_trained: bool
) -> None:
    trained, without = make_batch(1), make_batch(1)
    for name in ("loss_mask_T", "log_probabilities_T", "advantages_T"):
        without.columns[name] = np.zeros_like(without.columns[name])
    contribute(lone, trained, SUMMED)
    expected = gradients(lone)
    lone.learner.drop_step(0)
    for batch in (trained, without) if first_is_trained else (without, trained):
        contribute(lone, batch, SUMMED)
    assert all(torch.equal(found, given) for found, given in zip(gradients(lone), expected, strict=True))
    metrics = update(lone)
    assert metrics["tokens/trained"] == int(trained.loss_mask_T.sum())
    assert metrics["grad_norm"] > 0
    assert lone.run.progress.step == 1


def test_results_stay_when_their_rows_are_trained_again(lone: LoneRun) -> None:
    outcome = contribute(lone, make_batch(1), SUMMED)
    losses = outcome.columns["losses"].copy()
    lone.learner.open_step(0, with_all_tokens(make_batch(1)), SUMMED).begin_anew()
    assert losses.any()
    assert np.array_equal(outcome.columns["losses"], losses)


def test_a_joint_divisor_makes_two_contributions_one(dense_directory: Path, tmp_path: Path) -> None:
    """Also of the value head, which has a loss of its own; and the export has the tokens of both."""
    lone = make_lone_run(
        tmp_path, dense_directory, lora=LORA, value_head={"whiten": False}, loss={"kind": "ppo"}, token_export=True
    )
    batch = make_batch(1)
    objective = Objective(divisor=float(batch.loss_mask_T.sum()))
    train_passes(lone, batch, objective)
    expected = gradients(lone)
    lone.learner.drop_step(0)
    half = len(batch.samples) // 2
    for samples in (range(half), range(half, len(batch.samples))):
        train_passes(lone, batch_parts.part(batch, samples), objective)
    for found, given in zip(gradients(lone), expected, strict=True):
        torch.testing.assert_close(found, given)
    update(lone)
    (exported,) = (tmp_path / "trainer" / "tokens" / "default").iterdir()
    assert len(exported.read_text().splitlines()) == len(batch.samples)


def train_passes(lone: LoneRun, batch: Batch, objective: Objective) -> None:
    """A contribution that measures first."""
    step: Contribution | None = lone.learner.open_step(0, batch, objective)
    while step is not None:
        lone.learner.train_rows([[(0, step.samples)]])
        step = lone.learner.next_pass(0, AdamW(1e-3))
    lone.learner.conclude(0)
