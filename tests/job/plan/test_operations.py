"""The operations of a model are those that torch counts of the trainer's own passes; the bytes are those of its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from counterpoint.job.plan.dry_run import model_sizes
from counterpoint.job.plan.operations import (
    FLASH_BACKWARD,
    attention_operations,
    forward_operations,
    trained_parameters,
    training_operations,
    weights_of,
)
from counterpoint.run.trained import LoraConfig, TrainingConfig
from counterpoint.trainer.model.kernels.kept import LEAST_TOKENS

pytestmark = pytest.mark.slow

TOKENS = 48
PENALTY = {"reference": {"reward_coefficient": 0.1}}
"""The policy's own log-probabilities are measured, too."""
DENSE = Qwen3Config(
    vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
)  # fmt: skip
MIXTURE = Qwen3MoeConfig(
    vocab_size=300, hidden_size=64, moe_intermediate_size=96, intermediate_size=160, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8, num_experts_per_tok=2,
)  # fmt: skip


def saved(config: Qwen3Config | Qwen3MoeConfig, directory: Path) -> Path:
    config.save_pretrained(directory)
    return directory


def counted(config: Qwen3Config, trained: str) -> int:
    """What torch counts of the passes over one sample: `none`, `all`, or `inputs`, whose weights are frozen."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.requires_grad_(trained == "all")
    embedded = model.get_input_embeddings()(torch.zeros(1, TOKENS, dtype=torch.int64)).detach().requires_grad_()
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(trained != "none"):
        logits = model(inputs_embeds=embedded).logits
        if trained != "none":
            logits.sum().backward()
    return counter.get_total_flops()


def attention(directory: Path, context: float) -> float:
    return attention_operations(model_sizes(directory), TOKENS, context)


def test_the_forward_pass_is_what_torch_counts(tmp_path: Path) -> None:
    """Torch computes the upper half of the attention, too: each token sees all."""
    directory = saved(DENSE, tmp_path)
    ours = forward_operations(model_sizes(directory), TOKENS)
    assert ours - attention(directory, (TOKENS + 1) / 2) + attention(directory, TOKENS) == counted(DENSE, "none")


@pytest.mark.parametrize(("lora", "trained"), [(None, "all"), (LoraConfig(target_modules=["none"]), "inputs")])
def test_the_backward_pass_is_what_torch_counts(tmp_path: Path, lora: LoraConfig | None, trained: str) -> None:
    """Torch's eager attention keeps its forward pass: its backward takes twice as long, a kernel's half a pass more."""
    directory = saved(DENSE, tmp_path)
    ours = training_operations(model_sizes(directory), TrainingConfig(lora=lora), TOKENS, checkpointing=False)
    causal, whole = attention(directory, (TOKENS + 1) / 2), attention(directory, TOKENS)
    assert ours - (1 + FLASH_BACKWARD) * causal + 3 * whole == counted(DENSE, trained)


def test_an_adapter_has_operations_of_its_own(tmp_path: Path) -> None:
    sizes = model_sizes(saved(DENSE, tmp_path))
    with_none, with_one = (
        training_operations(
            sizes, TrainingConfig(lora=LoraConfig(rank=4, target_modules=[name])), 10, checkpointing=False
        )
        for name in ("none", "q_proj")
    )
    weights = 3 * 4 * (64 + 128)
    assert with_one - with_none == 3 * 2 * 10 * weights
    assert trained_parameters(sizes, TrainingConfig(lora=LoraConfig(rank=4, target_modules=["q_proj"]))) == weights


@pytest.mark.parametrize(
    ("training", "checkpointing", "passes"),
    [
        ({"epochs": 2, "updates_per_step": 2}, False, 7),
        ({}, True, 4),
        ({"reference": {}}, False, 4),
        (PENALTY, False, 5),
    ],
)
def test_more_passes_take_more(tmp_path: Path, training: dict[str, object], checkpointing: bool, passes: int) -> None:
    """A sample of one token has hardly any attention: a pass over the weights is a third of a step's."""
    sizes = model_sizes(saved(DENSE, tmp_path))
    config = TrainingConfig.model_validate(training)
    found = training_operations(sizes, config, 1, checkpointing=checkpointing) / forward_operations(sizes, 1)
    assert found == pytest.approx(passes, rel=0.01)


@pytest.mark.parametrize("tokens", [LEAST_TOKENS - 1, LEAST_TOKENS])
def test_attention_over_a_long_sample_is_not_computed_again(tmp_path: Path, tokens: int) -> None:
    directory = saved(DENSE, tmp_path)
    sizes, config = model_sizes(directory), TrainingConfig()
    less, more = (training_operations(sizes, config, tokens, checkpointing=share) for share in (False, True))
    kept = attention_operations(sizes, tokens, (tokens + 1) / 2) if tokens == LEAST_TOKENS else 0
    assert more - less == forward_operations(sizes, tokens) - kept


def test_a_token_uses_some_of_the_experts_and_many_tokens_use_all(tmp_path: Path) -> None:
    weights = weights_of(model_sizes(saved(MIXTURE, tmp_path)))
    expert = 3 * 64 * 96
    assert (weights.routed, weights.experts, weights.per_token) == (2 * 8 * expert, 8, 2)
    assert weights.active == weights.always + 2 * 2 * expert
    assert weights.touched(1) == pytest.approx(weights.active)
    assert weights.touched(1000) == pytest.approx(weights.always + weights.routed)


def test_the_experts_that_tokens_use_are_those_of_random_choices(tmp_path: Path) -> None:
    weights = weights_of(model_sizes(saved(MIXTURE, tmp_path)))
    torch.manual_seed(0)
    used = [torch.rand(5, 8).topk(2).indices.unique().numel() for _ in range(4000)]
    assert (weights.touched(5) - weights.always) / weights.routed == pytest.approx(sum(used) / len(used) / 8, rel=0.01)
