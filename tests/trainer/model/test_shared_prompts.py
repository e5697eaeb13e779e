"""Samples that share their prompt in a row are trained as samples that each have it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from torch import Tensor

from counterpoint.trainer.losses.contract import LossInputs, LossOutputs
from counterpoint.trainer.model import shared_prompts
from counterpoint.trainer.model.attention import per_sample_attention
from counterpoint.trainer.model.shared_prompts import Family, family_attention
from counterpoint.trainer.packer import ModelLimits, pack
from counterpoint.transport.records import Batch
from tests.support.batches import with_changes
from tests.trainer.conftest import VOCABULARY, make_batch
from tests.trainer.lone_run import LoneRun, make_lone_run
from tests.trainer.many_runs import Bench, gradients

FAMILIES = (Family(5, (3, 1, 7)), Family(2, (4,)), Family(9, (2, 2)), Family(1, (6, 5, 1, 1)))


def batch_of_groups(step: int = 1, run_id: str = "default") -> Batch:
    """A batch in which samples 0, 2, 4 and samples 1, 5 begin with the same tokens."""
    lengths, prompts = (9, 12, 7, 6, 11, 10), (4, 7, 4, 3, 4, 7)
    batch = make_batch(step, lengths, run_id)
    starts = batch.sample_offsets
    for first, others in ((0, (2, 4)), (1, (5,))):
        prompt = batch.token_ids_T[starts[first] : starts[first] + prompts[first]]
        for other in others:
            batch.token_ids_T[starts[other] : starts[other] + prompts[other]] = prompt
    mask = np.concatenate([np.arange(length) >= prompt for length, prompt in zip(lengths, prompts, strict=True)])
    mask[starts[4] + 8] = False  # what an environment says in between is not trained
    random = np.random.default_rng(step + 100)
    return with_changes(
        batch,
        loss_mask_T=mask.astype(np.uint8),
        log_probabilities_T=np.where(mask, -4.5 + 0.3 * random.standard_normal(len(mask)), 0).astype(np.float32),
        advantages_T=np.where(mask, random.standard_normal(len(mask)), 0).astype(np.float32),
    )


def answered(batch: Batch) -> Batch:
    """The same with answers to all tokens but the first, as a Tinker client has them: those of the prompt have no advantage."""
    mask = np.ones_like(batch.loss_mask_T)
    mask[batch.sample_offsets[:-1]] = 0
    log_probabilities_T = np.where(batch.loss_mask_T, batch.log_probabilities_T, -4.5 * mask).astype(np.float32)
    return with_changes(batch, loss_mask_T=mask, log_probabilities_T=log_probabilities_T)


def without_sharing(lone: LoneRun) -> LoneRun:
    lone.learner.loaded.limits = replace(lone.learner.loaded.limits, shares_prompts=False)
    return lone


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts that weights and metrics are the same, times excepted."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if not name.startswith(("phase/", "tokens_per_second")):
            assert found[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("block", [1, 16, 256], ids=["one family a call", "small blocks", "one block"])
def test_attention_is_that_of_whole_samples(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prompts, "BLOCK_TOKENS", block)
    shared_prompts._blocks.cache_clear()
    tokens = sum(family.tokens for family in FAMILIES)
    generator = torch.Generator().manual_seed(3)
    states = [torch.randn(1, heads, tokens, 8, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    weights = torch.randn(1, 4, tokens, 8, generator=generator)
    found = family_attention(states[0], states[1], states[2], FAMILIES, 0.3).transpose(1, 2)
    gradients = torch.autograd.grad(found, states, weights)

    copies = [tensor.detach().clone().requires_grad_() for tensor in states]
    expected = torch.zeros_like(weights)
    first = 0
    for family in FAMILIES:
        prompt = list(range(first, first + family.prompt))
        rest = first = first + family.prompt
        for length in family.rests:
            places = torch.tensor(prompt + list(range(rest, rest := rest + length)))
            query, key, value = (tensor[:, :, places] for tensor in copies)
            module = torch.nn.Identity()
            own, _ = per_sample_attention(module, query, key, value, None, scaling=0.3, sample_lengths=[len(places)])
            expected = expected.index_copy(2, places, own.transpose(1, 2))
        first = rest
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, copies, weights))
    shared_prompts._blocks.cache_clear()


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"lora": {"rank": 4}},
        {
            "updates_per_step": 2,
            "epochs": 2,
            "lora": {"rank": 4},
            "reference": {},
            "loss": {"kl_coefficient": 0.1},
            # AdamW would make a step of its own size of a gradient that is zero but for rounding.
            "optimizer": "sgd",
            "learning_rate": 0.1,
        },
        {"value_head": {}},
    ],
    ids=["full weights", "adapter", "several updates with a reference", "value head"],
)
@pytest.mark.slow
def test_a_step_is_that_of_whole_samples(dense_directory: Path, tmp_path: Path, training: dict[str, Any]) -> None:
    shared = make_lone_run(tmp_path / "shared", dense_directory, **training)
    whole = without_sharing(make_lone_run(tmp_path / "whole", dense_directory, **training))
    assert shared.learner.loaded.limits.shares_prompts
    for step in (1, 2, 3):
        assert_same(shared.train(batch_of_groups(step)), whole.train(batch_of_groups(step)))
    for name, weight in whole.weights().items():
        torch.testing.assert_close(shared.weights()[name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_step_whose_prompts_are_answered_is_that_of_whole_samples(dense_directory: Path, tmp_path: Path) -> None:
    shared = make_lone_run(tmp_path / "shared", dense_directory, lora={"rank": 4})
    whole = without_sharing(make_lone_run(tmp_path / "whole", dense_directory, lora={"rank": 4}))
    for step in (1, 2, 3):
        assert_same(shared.train(answered(batch_of_groups(step))), whole.train(answered(batch_of_groups(step))))
    for name, weight in whole.weights().items():
        torch.testing.assert_close(shared.weights()[name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_recomputed_layers_and_an_export_are_those_of_whole_samples(dense_directory: Path, tmp_path: Path) -> None:
    trainer = {"activation_checkpointing": True}
    shared = make_lone_run(tmp_path / "shared", dense_directory, trainer, token_export=True)
    whole = without_sharing(make_lone_run(tmp_path / "whole", dense_directory, token_export=True))
    assert shared.learner.loaded.limits.shares_prompts
    assert_same(shared.train(batch_of_groups()), whole.train(batch_of_groups()))
    found, expected = (
        sorted((tmp_path / name / "trainer/tokens/default/step_1.rank_0.jsonl").read_text().splitlines())
        for name in ("shared", "whole")
    )
    assert len(found) == len(expected) == 6
    for left, right in zip(map(orjson.loads, found), map(orjson.loads, expected), strict=True):
        for name in ("sample", "position", "token_id"):
            assert left[name] == right[name]
        assert left["trainer_log_probability"] == pytest.approx(right["trainer_log_probability"], abs=1e-5)


@pytest.mark.parametrize("answers", [False, True])
def test_a_prompt_is_shared_within_a_batch_only(answers: bool) -> None:
    """Two runs with the same tokens have other adapters, so a row has the prompt once for each."""
    limits = ModelLimits(vocabulary=VOCABULARY, max_tokens=64, layers=0, experts=0, top_k=0, shares_prompts=True)
    batch = answered(batch_of_groups()) if answers else batch_of_groups()
    samples = [4, 1, 0, 5, 2, 3]
    micro = pack([(batch, samples), (batch, [2, 0])], limits, torch.device("cpu"))
    whole = pack([(batch, samples), (batch, [2, 0])], replace(limits, shares_prompts=False), torch.device("cpu"))
    assert [part.tokens for part in micro.parts] == [55 - 8 - 7, 16 - 4]
    assert micro.families == (
        Family(4, (7, 5, 3)), Family(7, (5, 3)), Family(3, (3,)), Family(4, (3, 5), part=1),
    )  # fmt: skip
    for name in ("targets_P", "advantages_P", "sample_P", "environments_P", "temperatures_P"):
        assert torch.equal(getattr(micro, name), getattr(whole, name)), name
    seen: list[Tensor] = [each.token_ids_T[each.predicting_P] for each in (micro, whole)]
    assert torch.equal(*seen)
    assert torch.equal(micro.position_ids_T[micro.predicting_P], whole.position_ids_T[whole.predicting_P])


def test_a_large_family_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces have the prompt each, and a sample that is too long for others is alone."""
    monkeypatch.setattr("counterpoint.trainer.packer.FAMILY_TOKENS", 15)
    limits = ModelLimits(vocabulary=VOCABULARY, max_tokens=64, layers=0, experts=0, top_k=0, shares_prompts=True)
    batch = batch_of_groups()
    found = pack([(batch, [0, 2, 4, 1, 5])], limits, torch.device("cpu"))
    whole = pack([(batch, [0, 2, 4, 1, 5])], replace(limits, shares_prompts=False), torch.device("cpu"))
    assert found.families == (Family(4, (5, 3)), Family(4, (7,)), Family(7, (5, 3)))
    assert torch.equal(found.token_ids_T[found.predicting_P], whole.token_ids_T[whole.predicting_P])
    monkeypatch.setattr("counterpoint.trainer.packer.FAMILY_TOKENS", 8)
    assert pack([(batch, [0, 2, 4, 1, 5])], limits, torch.device("cpu")).families is None


def test_recorded_routing_is_of_each_sample(moe_directory: Path, tmp_path: Path) -> None:
    lone = make_lone_run(tmp_path, moe_directory)
    assert lone.learner.loaded.limits.shares_prompts
    routed = make_batch(lengths=(9, 6, 11), routed=True)
    routed.token_ids_T[9] = routed.token_ids_T[0]
    micro = pack([(routed, [0, 1, 2])], lone.learner.loaded.limits, torch.device("cpu"))
    assert micro.families is None
    assert micro.routed_experts_TLK is not None
    assert len(micro.token_ids_T) == len(micro.routed_experts_TLK) == 26


@pytest.mark.slow
def test_runs_in_one_row_share_their_own_prompts(dense_directory: Path) -> None:
    """Both runs have batches of the same tokens, which their adapters compute differently."""
    found: list[dict[str, Tensor]] = []
    for shares in (True, False):
        bench = Bench(dense_directory, max_tokens=128)
        bench.limits = replace(bench.limits, shares_prompts=shares)
        runs = [bench.admit(slot, rank=4, alpha=8.0) for slot in (1, 3)]
        steps = [bench.open(run, batch_of_groups(1, run.run_id)) for run in runs]
        bench.train([(step, [4, 1, 0, 5, 2, 3]) for step in steps])
        found.append({f"{run.slot}.{name}": value for run in runs for name, value in gradients(run).items()})
    assert found[0].keys() == found[1].keys()
    for name, expected in found[1].items():
        torch.testing.assert_close(found[0][name], expected, atol=1e-6, rtol=1e-4)
    assert any(not torch.equal(value, found[0][f"3.{name[2:]}"]) for name, value in found[0].items() if name[0] == "1")


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, "weights"])
def test_what_is_no_number_stays_in_its_run(dense_directory: Path, broken: float | str) -> None:
    """Their samples share one call of the attention otherwise, since a block has room for both."""

    def gradients_of_second(*, breaks: bool) -> dict[str, Tensor]:
        def loss(inputs: LossInputs) -> LossOutputs:
            factor = broken if breaks and not isinstance(broken, str) else 1.0
            loss_P = inputs.trainer_log_probabilities_P * factor
            return LossOutputs(loss_P, torch.zeros_like(loss_P, dtype=torch.bool))

        bench = Bench(dense_directory, max_tokens=128)
        bench.limits = replace(bench.limits, shares_prompts=True)
        runs = [bench.admit(0, loss, rank=2), bench.admit(1, rank=2)]
        if breaks and broken == "weights":
            with torch.no_grad():
                for parameter in bench.parameters(0).values():
                    parameter.fill_(torch.nan)
        steps = [bench.open(run, batch_of_groups(1, run.run_id)) for run in runs]
        bench.train([(step, step.samples) for step in steps])
        return gradients(runs[1])

    found, expected = gradients_of_second(breaks=True), gradients_of_second(breaks=False)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-4)
