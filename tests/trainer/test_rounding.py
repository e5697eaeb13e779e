"""How far rounding moves a model's results: measured beside what another precision really does, with right and wrong experts."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from counterpoint.inference.base import Probe
from counterpoint.trainer.model.load import load_model, log_probabilities
from counterpoint.trainer.model.packing_proof import prove_packing
from counterpoint.trainer.probe import rounded, write_probe

CPU = torch.device("cpu")


def values(model: nn.Module, token_ids: list[int]) -> Tensor:
    """The log-probability of each token after the first."""
    tokens_T, places_T = torch.tensor(token_ids), torch.arange(len(token_ids))
    with torch.no_grad():
        return log_probabilities(model, tokens_T, places_T, [len(tokens_T)], places_T[:-1], tokens_T[1:], 1.0)[0]


def test_a_model_is_changed_within_and_as_before_afterwards(dense_directory: Path) -> None:
    model, tokens = load_model(dense_directory, "float32", CPU), [5, 9, 2, 7, 1]
    before = values(model, tokens)
    with rounded(model):
        first, second = values(model, tokens), values(model, tokens)
    with rounded(model):
        again = values(model, tokens)
    assert not torch.equal(first, before)
    assert not torch.equal(first, second), "each pass is rounded anew"
    assert torch.equal(first, again), "the ranks of a sharded model compute the same"
    assert torch.equal(values(model, tokens), before)
    torch.testing.assert_close(first, before, rtol=0, atol=0.1)


def mixture(directory: Path, seed: int) -> None:
    """Saves a mixture with weights so large that rounding changes which experts compute a token."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=100, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=12,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


@pytest.mark.slow
def test_right_weights_of_a_mixture_pass_in_bfloat16_and_wrong_experts_do_not(tmp_path: Path) -> None:
    """The other engine is transformers, with the same weights in float32: what it computes without rounding."""
    by_one_bound = 0
    for seed in range(3):
        directory, path = tmp_path / str(seed), tmp_path / f"{seed}.json"
        mixture(directory, seed)
        model = load_model(directory, "bfloat16", CPU)
        prove_packing(model)
        write_probe(model, 1, path, 0, {}, None)
        probe = Probe.read(path)
        exact = copy.deepcopy(model).float()
        answer = values(exact, probe.token_ids).numpy()
        assert probe.mismatch(answer, None, "bfloat16") is None, seed
        by_one_bound += probe.mismatch(answer, None, "float32") is not None
        wrong = copy.deepcopy(exact)
        with torch.no_grad():
            for name, weights in wrong.named_parameters():
                if name.endswith("experts.gate_up_proj"):
                    weights.copy_(weights.flip(0))
        assert probe.mismatch(values(wrong, probe.token_ids).numpy(), None, "bfloat16") is not None, seed
    assert by_one_bound, "rounding never mattered, so this shows nothing"
