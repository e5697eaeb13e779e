"""A training step: the same however it is packed, its metrics those of a plain computation, and refused when not finite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from counterpoint.trainer.losses.contract import Loss, LossInputs, LossOutputs
from counterpoint.trainer.packer import InvalidBatch
from counterpoint.trainer.updates.columns import Columns
from counterpoint.trainer.work.contribution import LARGEST, Contribution
from counterpoint.transport.records import Batch
from tests.support.batches import with_changes
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import make_lone_run


def test_metrics_are_those_of_a_plain_computation(dense_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory)
    batch = make_batch()
    trained = batch.loss_mask_T == 1
    rows, mismatches = [], []
    for index, info in enumerate(batch.samples):
        span = slice(*batch.sample_offsets[index : index + 2])
        tokens = torch.from_numpy(batch.token_ids_T[span]).long()
        with torch.no_grad():
            logits = lone.model(input_ids=tokens[None], use_cache=False, sample_lengths=[len(tokens)]).logits[0]
        distribution = torch.distributions.Categorical(logits=logits[:-1] / info.temperature)
        keep = torch.from_numpy(trained[span][1:])
        log_p = distribution.log_prob(tokens[1:])[keep].numpy()
        difference = log_p - batch.log_probabilities_T[span][trained[span]]
        ratio = np.exp(difference)
        masked = (ratio < 0.125) | (ratio > 8)
        advantages = batch.advantages_T[span][trained[span]]
        loss = -np.where(masked, 0, np.minimum(ratio, 2)) * advantages * log_p
        entropy = distribution.entropy()[keep].numpy()
        rows += [
            (info.environment, *values)
            for values in zip(loss, entropy, np.exp(difference) - 1 - difference, ratio, masked, strict=True)
        ]
        if len(difference):
            mismatches.append((float(np.mean(np.exp(difference) - 1 - difference)), info.rollout_id))
    metrics = lone.train(batch)
    largest = sorted(mismatches, reverse=True)[:LARGEST]
    found = lone.learner.runs[0].mismatches
    assert [rollout for rollout, _ in found] == [rollout for _, rollout in largest]
    assert [value for _, value in found] == pytest.approx([value for value, _ in largest], rel=1e-4)
    for suffix, chosen in [("", rows)] + [
        (f"/{name}", [r for r in rows if r[0] == name]) for name in ("guess", "reverse")
    ]:
        columns = np.array([row[1:] for row in chosen], dtype=np.float64)
        assert metrics[f"loss{suffix}"] == pytest.approx(columns[:, 0].mean(), abs=1e-4)
        assert metrics[f"entropy{suffix}"] == pytest.approx(columns[:, 1].mean(), abs=1e-4)
        assert metrics[f"mismatch_kl{suffix}"] == pytest.approx(columns[:, 2].mean(), rel=1e-4)
        assert metrics[f"importance_ratio{suffix}/mean"] == pytest.approx(columns[:, 3].mean(), rel=1e-4)
        assert metrics[f"importance_ratio{suffix}/max"] == pytest.approx(columns[:, 3].max(), rel=1e-4)
        assert metrics[f"masked_share{suffix}"] == pytest.approx(columns[:, 4].mean())
        assert metrics[f"tokens/trained{suffix}"] == len(chosen)
    assert (metrics["entropy/all"], metrics["mismatch_kl/all"]) == (metrics["entropy"], metrics["mismatch_kl"])
    assert metrics["replayed_share"] == 0.0
    assert 0 < float(metrics["masked_share"]) < 1


def test_the_effective_sample_size_is_that_of_a_computation_in_float64(dense_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory)
    batch = make_batch(4)
    lags = (1, 3, 1, 40)
    samples = [replace(info, policy_version=4 - lag) for info, lag in zip(batch.samples, lags, strict=True)]
    batch = replace(batch, samples=tuple(samples))
    log_weights: dict[str, list[float]] = {}
    for index, (info, lag) in enumerate(zip(batch.samples, lags, strict=True)):
        span = slice(*batch.sample_offsets[index : index + 2])
        tokens, trained = torch.from_numpy(batch.token_ids_T[span]).long(), batch.loss_mask_T[span] == 1
        with torch.no_grad():
            logits = lone.model(input_ids=tokens[None], use_cache=False, sample_lengths=[len(tokens)]).logits[0]
        log_p = (logits.double() / info.temperature).log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
        own = log_p[trained[1:]] - batch.log_probabilities_T[span][trained].astype(np.float64)
        for name in ("mean", str(min(lag, 16))):
            log_weights.setdefault(name, []).extend(own)
    metrics = lone.train(batch)
    assert {name for name in metrics if name.startswith("ess/")} == {f"ess/{name}" for name in log_weights}
    for name, values in log_weights.items():
        weights = np.exp(np.array(values) - max(values))  # the scale does not matter
        expected = weights.sum() ** 2 / (len(weights) * (weights**2).sum())
        assert 0 < expected < 1
        assert metrics[f"ess/{name}"] == pytest.approx(expected, rel=1e-4)


def test_a_weight_beyond_the_floats_leaves_an_effective_sample_of_one_token(
    dense_directory: Path, tmp_path: Path
) -> None:
    batch = make_batch()
    first = int(np.flatnonzero(batch.loss_mask_T)[0])
    log_probabilities_T = batch.log_probabilities_T.copy()
    log_probabilities_T[first] = -1e4
    lone = make_lone_run(tmp_path, dense_directory)
    metrics = lone.train(with_changes(batch, log_probabilities_T=log_probabilities_T))
    assert metrics["ess/mean"] == pytest.approx(1 / int(batch.loss_mask_T.sum()))


def test_how_much_of_the_gradient_clipping_leaves(dense_directory: Path, tmp_path: Path) -> None:
    free = make_lone_run(tmp_path / "free", dense_directory, max_grad_norm=1e6).train(make_batch())
    clipped = make_lone_run(tmp_path / "clipped", dense_directory, max_grad_norm=1e-3).train(make_batch())
    assert free["grad_kept"] == 1.0
    assert clipped["grad_kept"] == pytest.approx(1e-3 / float(clipped["grad_norm"]))


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_packing_does_not_change_the_step(dense_directory: Path, tmp_path: Path, lora: dict[str, int] | None) -> None:
    wide = make_lone_run(tmp_path, dense_directory, lora=lora)
    narrow = make_lone_run(tmp_path, dense_directory, {"max_tokens": 18}, lora=lora)
    for step in (1, 2, 3):
        together, apart = wide.train(make_batch(step)), narrow.train(make_batch(step))
        for name in ("loss", "mismatch_kl", "grad_norm", "loss/guess"):
            assert apart[name] == pytest.approx(together[name], abs=1e-5)
    former, latter = wide.weights(), narrow.weights()
    assert max(float((former[name] - latter[name]).abs().max()) for name in former) < 1e-5


def test_replay_is_used_where_the_batch_has_routing(moe_directory: Path, tmp_path: Path) -> None:
    batch = make_batch(routed=True)
    replayed = make_lone_run(tmp_path, moe_directory).train(batch)
    free = make_lone_run(tmp_path, moe_directory, {"router_replay": False}).train(batch)
    plain = make_lone_run(tmp_path, moe_directory).train(replace(batch, routed_experts=()))
    assert replayed["replayed_share"] == 1.0
    assert free["replayed_share"] == plain["replayed_share"] == 0.0
    assert free["loss"] == plain["loss"]
    assert replayed["mismatch_kl"] != free["mismatch_kl"]


def test_a_batch_with_nothing_to_train_leaves_the_weights(dense_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory)
    lone.train(make_batch(1))
    before = lone.weights()
    empty = make_batch(2)
    empty.loss_mask_T[:] = 0
    metrics = lone.train(empty)
    assert metrics["grad_norm"] == metrics["loss"] == 0.0
    lone.train(make_batch(3, lengths=()))
    after = lone.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert lone.run.progress.step == 3


def broken(inputs: LossInputs) -> LossOutputs:
    """A loss that is finite, with a gradient that is not."""
    loss_P = inputs.trainer_log_probabilities_P.detach() + (inputs.trainer_log_probabilities_P * 0.0).abs().sqrt()
    return LossOutputs(loss_P, torch.zeros_like(loss_P, dtype=torch.bool))


def reporting(inputs: LossInputs) -> LossOutputs:
    """A loss with two metrics of its own, the second of another name once there are advantages above 5."""
    loss_P = -inputs.advantages_P * inputs.trainer_log_probabilities_P
    second = "other" if bool((inputs.advantages_P > 5).any()) else "constant"
    metrics_P = {"advantage": inputs.advantages_P, second: torch.full_like(loss_P, 2.0)}
    return LossOutputs(loss_P, torch.zeros_like(loss_P, dtype=torch.bool), metrics_P)


def test_a_loss_reports_metrics_of_its_own(dense_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory, {"max_tokens": 18}, loss={"kind": f"{__name__}:reporting"})
    batch = make_batch(1)
    metrics = lone.train(batch)
    trained = batch.loss_mask_T.astype(bool)
    assert metrics["custom_loss/advantage"] == pytest.approx(batch.advantages_T[trained].mean(), rel=1e-5)
    assert metrics["custom_loss/constant"] == metrics["custom_loss/guess/constant"] == 2.0
    assert "custom_loss/guess/advantage" in metrics
    batch = make_batch(2)
    batch.advantages_T[trained] = 6.0
    with pytest.raises(InvalidBatch, match=r"metrics_P has advantage, other; expected advantage, constant"):
        lone.train(batch)


@pytest.mark.parametrize("case", ["loss", "gradient"])
def test_what_is_not_finite_is_refused_and_changes_nothing(dense_directory: Path, tmp_path: Path, case: str) -> None:
    lone = make_lone_run(tmp_path, dense_directory)
    if case == "gradient":
        lone.run.torch.loss = Loss(broken)
    before = lone.weights()
    batch = make_batch(1)
    if case == "loss":
        batch.advantages_T[4] = np.inf
    with pytest.raises(InvalidBatch, match=f"the {case} of step 1 is not finite"):
        lone.train(batch)
    after = lone.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert lone.run.progress.step == 0
    assert all(parameter.grad is None for parameter in lone.model.parameters())


@pytest.mark.parametrize("owner", [Columns, Contribution])
def test_a_lack_of_memory_outside_of_a_row_refuses_the_step(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type
) -> None:
    """While the step is opened, or while advantages are computed from what it has measured."""

    def lack_memory(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    lone, plain = (
        make_lone_run(tmp_path / name, dense_directory, value_head={}, updates_per_step=2) for name in ("lone", "plain")
    )
    before = lone.weights()
    with monkeypatch.context() as patched:
        patched.setattr(owner, "conclude" if owner is Columns else "__init__", lack_memory)
        with pytest.raises(InvalidBatch, match=r"step 1 .*failed: RuntimeError: .*can't allocate memory"):
            lone.train(make_batch(1))
    after = lone.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)
    lone.learner.drop_step(0)
    assert lone.train(make_batch(1))["loss"] == plain.train(make_batch(1))["loss"]


def test_token_export_lists_every_trained_token(dense_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, dense_directory, {"max_tokens": 18}, token_export=True)
    batch = make_batch(1)
    lone.train(batch)
    lines = (tmp_path / "trainer" / "tokens" / "default" / "step_1.rank_0.jsonl").read_bytes().splitlines()
    found = {line["sample"]: line for line in map(orjson.loads, lines)}
    assert sorted(found) == [0, 1, 2, 3]
    for index, line in found.items():
        span = slice(*batch.sample_offsets[index : index + 2])
        trained = np.flatnonzero(batch.loss_mask_T[span])
        assert line["rollout_id"] == f"1-{index}"
        assert line["position"] == trained.tolist()
        assert line["token_id"] == batch.token_ids_T[span][trained].tolist()
        assert line["inference_log_probability"] == pytest.approx(batch.log_probabilities_T[span][trained].tolist())
        assert len(line["trainer_log_probability"]) == len(line["masked"]) == len(trained)


def test_a_token_that_the_mask_leaves_out_has_no_gradient(dense_directory: Path, tmp_path: Path) -> None:
    """Whatever its advantage and log-probability would be, and as in a sample that never trained it."""
    batch = make_batch()
    left_out = np.flatnonzero(batch.loss_mask_T)[::2]
    weights = []
    for index, (advantage, log_probability) in enumerate([(0.0, 0.0), (1000.0, -3.0)]):
        columns = {name: getattr(batch, name).copy() for name in ("loss_mask_T", "advantages_T", "log_probabilities_T")}
        for name, value in zip(columns, (0, advantage, log_probability), strict=True):
            columns[name][left_out] = value
        lone = make_lone_run(tmp_path / str(index), dense_directory)
        metrics = lone.train(with_changes(batch, **columns))
        assert metrics["tokens/trained"] == int(batch.loss_mask_T.sum()) - len(left_out)
        weights.append(lone.weights())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def of_samples_and_entropy(inputs: LossInputs) -> LossOutputs:
    """A loss of whole samples, with an entropy term: mean log-probability times mean entropy, at the tokens' weights."""
    assert inputs.sample_P.diff().ge(0).all()
    assert inputs.sample_P.unique().tolist() == list(range(inputs.samples))
    counts_S = torch.bincount(inputs.sample_P).float()

    def means_P(values_P: torch.Tensor) -> torch.Tensor:
        sums_S = torch.zeros(inputs.samples).index_add(0, inputs.sample_P, values_P)
        return (sums_S / counts_S)[inputs.sample_P]

    loss_P = means_P(inputs.trainer_log_probabilities_P) * means_P(inputs.entropies_P)
    return LossOutputs(loss_P, torch.zeros_like(loss_P, dtype=torch.bool))


def test_a_loss_of_whole_samples_and_of_entropy(dense_directory: Path, tmp_path: Path) -> None:
    loss = {"kind": f"{__name__}:of_samples_and_entropy"}
    lone = make_lone_run(
        tmp_path / "wide", dense_directory, loss=loss, optimizer="sgd", max_grad_norm=1e9, learning_rate=1.0
    )
    assert lone.run.torch.loss.uses_entropy
    batch, before = make_batch(1), lone.weights()
    for parameter in lone.model.parameters():
        parameter.requires_grad_()
    total = torch.zeros(())
    for index, info in enumerate(batch.samples):
        span = slice(*batch.sample_offsets[index : index + 2])
        tokens = torch.from_numpy(batch.token_ids_T[span]).long()
        logits = lone.model(input_ids=tokens[None], use_cache=False, sample_lengths=[len(tokens)]).logits[0]
        distribution = torch.distributions.Categorical(logits=logits[:-1] / info.temperature)
        keep = torch.from_numpy(batch.loss_mask_T[span] == 1)[1:]
        total = (
            total + keep.sum() * distribution.log_prob(tokens[1:])[keep].mean() * distribution.entropy()[keep].mean()
        )
    names = list(before)
    own = [dict(lone.model.named_parameters())[name] for name in names]
    expected = torch.autograd.grad(total / int(batch.loss_mask_T.sum()), own)
    metrics = lone.train(batch)
    after, rate = lone.weights(), lone.run.config.training.learning_rate
    for name, gradient in zip(names, expected, strict=True):
        assert float((before[name] - rate * gradient - after[name]).abs().max()) < 2e-5
    narrow = make_lone_run(tmp_path / "narrow", dense_directory, {"max_tokens": 18}, loss=loss)
    apart = narrow.train(batch)
    assert apart["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
    assert apart["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "grpo"},
        {"kind": "dr_grpo", "normalisation_length": 12},
        {"kind": "gspo", "clip_low": 0.5, "clip_high": 1.0},
        {"kind": "reinforce", "normalisation": "sequence", "correction": "mask", "correction_level": "sequence_mean"},
        {"kind": "dapo", "entropy_coefficient": 0.1},
    ],
)
def test_a_loss_depends_neither_on_rows_nor_on_ranks(
    dense_directory: Path, tmp_path: Path, loss: dict[str, object]
) -> None:
    """The gradient of a step in one row is that of a row for each sample, and the sum of what two ranks have of it."""
    lone = make_lone_run(tmp_path, dense_directory, loss=loss)
    batch = make_batch()
    # Near enough for every loss to weigh some tokens, and not all alike.
    batch.log_probabilities_T[:] = np.where(batch.loss_mask_T == 1, -3.5 + 0.4 * batch.log_probabilities_T, 0.0)
    lone.learner.loaded.limits = replace(lone.learner.loaded.limits, max_tokens=1000)

    def gradient(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        step = lone.learner.open_step(0, batch)
        for row in rows:
            lone.learner.train_rows([[(0, row)]])
        gradients = torch.cat([each.flatten().clone() for each in lone.run.torch.optimizer.gradients()])
        lone.learner.drop_step(0)
        return gradients, step.sums_EM.clone()

    together, sums = gradient([[0, 1, 2, 3]])
    assert float(together.norm()) > 0.01
    for parts in ([[[0], [1], [2], [3]]], [[[3, 1]], [[0], [2]]]):
        ranks = [gradient(rows) for rows in parts]
        assert float((sum(own for own, _ in ranks) - together).abs().max()) < 1e-6 * max(1.0, float(together.norm()))
        assert torch.allclose(sum((own for _, own in ranks), torch.zeros(())), sums, atol=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "grpo"},
        {"kind": "grpo", "normalisation": "token"},
        {"kind": "dr_grpo", "normalisation_length": 20},
    ],
    ids=["sequence", "token", "sample"],
)
def test_the_loss_of_an_environment_is_that_of_its_samples_alone(
    dense_directory: Path, tmp_path: Path, loss: dict[str, Any]
) -> None:
    batch = make_batch(1, (4, 30, 5, 25, 6, 9))
    whole = make_lone_run(tmp_path / "whole", dense_directory, loss=loss).train(batch)
    for name in sorted({sample.environment for sample in batch.samples}):
        own = [index for index, sample in enumerate(batch.samples) if sample.environment == name]
        alone = make_lone_run(tmp_path / name, dense_directory, loss=loss).train(part_of(batch, own))
        assert whole[f"loss/{name}"] == pytest.approx(alone["loss"], rel=1e-5)
        assert alone[f"loss/{name}"] == pytest.approx(alone["loss"], rel=1e-9)


def part_of(batch: Batch, samples: list[int]) -> Batch:
    """The batch of some of its samples."""
    places = [np.arange(batch.sample_offsets[sample], batch.sample_offsets[sample + 1]) for sample in samples]
    kept = np.concatenate(places)
    return with_changes(
        batch,
        samples=tuple(batch.samples[sample] for sample in samples),
        token_ids_T=batch.token_ids_T[kept],
        loss_mask_T=batch.loss_mask_T[kept],
        log_probabilities_T=batch.log_probabilities_T[kept],
        advantages_T=batch.advantages_T[kept],
        sample_offsets=np.cumsum([0, *map(len, places)], dtype=np.int64),
    )
