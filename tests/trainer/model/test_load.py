"""The model as the trainer runs it: packing, replay and adapters change nothing but what they are meant to."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from counterpoint.trainer.model.load import load_model, log_probabilities
from counterpoint.trainer.model.router_replay import RouterReplay
from tests.trainer.conftest import EXPERTS, LAYERS, TOP_K, VOCABULARY

CPU = torch.device("cpu")
LENGTHS = [7, 1, 12, 4]


def run(model: nn.Module, tokens_T: Tensor, lengths: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probability of each token but the first of each sample, and (last row) nothing else."""
    positions_T = torch.cat([torch.arange(length) for length in lengths])
    predicting_P = torch.tensor([i for i in range(len(tokens_T) - 1) if positions_T[i + 1] != 0])
    values_P, _ = log_probabilities(
        model, tokens_T, positions_T, lengths, predicting_P, tokens_T[predicting_P + 1], temperature
    )
    return values_P


@pytest.fixture(params=["moe", "dense"])
def directory(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_directory")
    return path


def random_tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def test_packed_samples_do_not_see_each_other(directory: Path) -> None:
    model = load_model(directory, "float32", CPU)
    tokens_T = random_tokens()
    packed_P = run(model, tokens_T, LENGTHS)
    alone = [run(model, sample, [len(sample)]) for sample in tokens_T.split(LENGTHS) if len(sample) > 1]
    torch.testing.assert_close(packed_P, torch.cat(alone), rtol=0, atol=2e-6)


def test_agrees_with_transformers_own_attention(directory: Path) -> None:
    """The stock model, one sample at a time, with its own mask: an independent path to the same numbers."""
    model = load_model(directory, "float32", CPU)
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tokens_T = random_tokens()
    expected = []
    for sample in tokens_T.split(LENGTHS):
        logits = stock(input_ids=sample[None], use_cache=False).logits[0] / 0.7
        expected.append(logits[:-1].log_softmax(-1).gather(-1, sample[1:, None])[:, 0])
    torch.testing.assert_close(run(model, tokens_T, LENGTHS, 0.7), torch.cat(expected), rtol=0, atol=5e-6)


def test_each_token_has_its_own_temperature(dense_directory: Path) -> None:
    model = load_model(dense_directory, "float32", CPU)
    tokens_T = torch.arange(6)
    arguments = (model, tokens_T, tokens_T, [6], torch.tensor([1, 2, 4]), torch.tensor([5, 6, 7]))
    values_P, entropy_P = log_probabilities(*arguments, torch.tensor([0.5, 1.0, 2.0]))
    for index, temperature in enumerate((0.5, 1.0, 2.0)):
        expected = log_probabilities(*arguments, temperature)
        torch.testing.assert_close((values_P[index], entropy_P[index]), (expected[0][index], expected[1][index]))
    assert len({round(float(value), 3) for value in entropy_P}) == 3


def test_entropy_is_that_of_the_distribution(dense_directory: Path) -> None:
    model = load_model(dense_directory, "float32", CPU)
    tokens_T = torch.arange(6)
    _, entropy_P = log_probabilities(model, tokens_T, tokens_T, [6], torch.tensor([2, 4]), torch.tensor([0, 0]), 1.3)
    logits = model(input_ids=tokens_T[None], use_cache=False, sample_lengths=[6]).logits[0]
    expected = torch.distributions.Categorical(logits=logits[[2, 4]] / 1.3).entropy()
    torch.testing.assert_close(entropy_P, expected)


def own_routing(model: nn.Module, replay: RouterReplay, tokens_T: Tensor) -> Tensor:
    with replay.observing() as probabilities:
        run(model, tokens_T, LENGTHS)
    return torch.stack([probabilities[layer].topk(TOP_K).indices for layer in range(LAYERS)], dim=1)


def test_replaying_its_own_routing_changes_nothing(moe_directory: Path) -> None:
    model = load_model(moe_directory, "float32", CPU)
    replay = RouterReplay(model)
    assert (replay.layers, replay.experts, replay.top_k) == (LAYERS, EXPERTS, TOP_K)
    tokens_T = random_tokens()
    free_P = run(model, tokens_T, LENGTHS)
    record_TLK = own_routing(model, replay, tokens_T)
    with replay.replaying(record_TLK.to(torch.uint8), torch.ones(len(tokens_T), dtype=torch.bool)):
        replayed_P = run(model, tokens_T, LENGTHS)
    assert torch.equal(free_P, replayed_P)
    assert torch.equal(free_P, run(model, tokens_T, LENGTHS)), "the replay outlives its context"


def test_other_routing_gives_other_results_where_it_was_recorded(moe_directory: Path) -> None:
    model = load_model(moe_directory, "float32", CPU)
    replay = RouterReplay(model)
    tokens_T = random_tokens()
    free_P = run(model, tokens_T, LENGTHS)
    record_TLK = (own_routing(model, replay, tokens_T) + 1) % EXPERTS
    has_record_T = torch.zeros(len(tokens_T), dtype=torch.bool)
    with replay.replaying(record_TLK, has_record_T):
        assert torch.equal(run(model, tokens_T, LENGTHS), free_P), "rows without a record must keep the model's choice"
    has_record_T[: LENGTHS[0]] = True
    with replay.replaying(record_TLK, has_record_T):
        changed_P = run(model, tokens_T, LENGTHS)
    first = LENGTHS[0] - 1
    assert (changed_P[:first] - free_P[:first]).abs().min() > 1e-4
    torch.testing.assert_close(changed_P[first:], free_P[first:], rtol=0, atol=2e-6)


def test_the_gate_learns_through_a_replayed_choice(moe_directory: Path) -> None:
    model = load_model(moe_directory, "float32", CPU)
    replay = RouterReplay(model)
    tokens_T = random_tokens()
    record_TLK = (own_routing(model, replay, tokens_T) + 1) % EXPERTS
    with replay.replaying(record_TLK, torch.ones(len(tokens_T), dtype=torch.bool)):
        run(model, tokens_T, LENGTHS).sum().backward()
    for layer in range(LAYERS):
        assert float(model.get_submodule(f"model.layers.{layer}.mlp.gate").weight.grad.abs().max()) > 1e-4


def test_an_unknown_gate_is_refused(moe_directory: Path) -> None:
    class StrangeRouter(nn.Module):
        pass

    model = load_model(moe_directory, "float32", CPU)
    model.add_module("strange", StrangeRouter())
    with pytest.raises(ValueError, match="StrangeRouter; set router_replay = false"):
        RouterReplay(model)


def test_experts_without_a_gate_we_know_are_refused(dense_directory: Path) -> None:
    """Else a batch's routing would be dropped without a word."""
    model = load_model(dense_directory, "float32", CPU)
    model.config.num_local_experts = 4
    with pytest.raises(ValueError, match=r"4 experts.*set router_replay = false"):
        RouterReplay(model)


def test_damaged_weights_are_named(dense_directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(dense_directory, tmp_path / "model")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="model' cannot be loaded"):
        load_model(copy, "float32", CPU)


@pytest.mark.parametrize("name", ["model.safetensors", "shard.safetensors"])
def test_a_fifo_in_place_of_a_file_is_refused_at_once(dense_directory: Path, tmp_path: Path, name: str) -> None:
    """A run may name the model of its reference, for which the trainer of all runs would wait for ever."""
    copy = shutil.copytree(dense_directory, tmp_path / "model")
    (copy / "model.safetensors").unlink()
    os.mkfifo(copy / name)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(ValueError, match=f"model' cannot be loaded: {name} is "):
        load_model(copy, "float32", CPU)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"weight_map": {"a": "../other"}}, "names '../other'; expected files of the same directory"),
        ({"weight_map": {"a": ".."}}, r"names '\.\.'; expected files of the same directory"),
        ({"weight_map": {"a": 3}}, "names 3; expected files of the same directory"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_a_wrong_index_is_named(dense_directory: Path, tmp_path: Path, index: object, reason: str) -> None:
    copy = shutil.copytree(dense_directory, tmp_path / "model")
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"model' cannot be loaded: .*{reason}"):
        load_model(copy, "float32", CPU)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no config\.json"):
        load_model(tmp_path / "nowhere", "float32", CPU)


def test_a_models_own_code_is_never_run(dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest names its reference model. Nobody is asked at a terminal either."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    model, ran = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(dense_directory, model)
    (model / "own.py").write_text(f"open({str(ran)!r}, 'w').close()")
    config = json.loads((model / "config.json").read_text())
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (model / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": own}))
    with pytest.raises(ValueError, match=f"model = '{model}'"):
        load_model(model, "float32", CPU)
    assert not ran.exists()
