"""Packing is proven when a model is loaded: models of many kinds, tiny and random, as transformers defines them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconH1Config,
    Gemma2Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.trainer.conftest import VOCABULARY, make_batch
from tests.trainer.lone_run import make_lone_run
from trainer.broadcast import Broadcaster
from trainer.model.load import load_model
from trainer.model.packing_proof import can_pack, can_share_prompts, prove_packing

CPU = torch.device("cpu")

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LINEAR: dict[str, Any] = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_STATE_SPACE: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}

LOOKING_BACK: dict[str, Callable[[], PretrainedConfig]] = {
    "qwen3_5": lambda: Qwen3_5TextConfig(**_SHAPE, **_LINEAR),
    "lfm2": lambda: Lfm2Config(**_SHAPE, layer_types=["conv", "full_attention"]),
    "granite_hybrid": lambda: GraniteMoeHybridConfig(
        **_SHAPE,
        **_STATE_SPACE,
        layer_types=["mamba", "attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=48,
    ),
    "mamba2": lambda: Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        state_size=8,
        n_groups=1,
        chunk_size=16,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **_SHAPE,
        **_LINEAR,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    "falcon_h1": lambda: FalconH1Config(**_SHAPE, **{**_STATE_SPACE, "mamba_d_head": 8}, mamba_d_ssm=32),
}
"""Models with layers that bypass the attention interface."""


def save(config: PretrainedConfig, directory: Path) -> Path:
    torch.manual_seed(4)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def stock_log_probabilities(directory: Path, token_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """As transformers computes one sample by itself."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = model(input_ids=token_ids[None], use_cache=False).logits[0] / temperature
    return logits[:-1].log_softmax(-1).gather(-1, token_ids[1:, None])[:, 0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOOKING_BACK)
def test_a_model_whose_layers_look_back_is_trained_one_sample_a_row(tmp_path: Path, kind: str) -> None:
    """In both precisions it is found out; then a step is what it would be with every sample alone."""
    directory = save(LOOKING_BACK[kind](), tmp_path / "model")
    for dtype in ("float32", "bfloat16"):
        model = load_model(directory, dtype, CPU)
        prove_packing(model)
        assert not can_pack(model), dtype
        assert not can_share_prompts(model), dtype
    batch = make_batch(1)
    expected = []
    for sample in range(len(batch.samples)):
        span = slice(int(batch.sample_offsets[sample]), int(batch.sample_offsets[sample + 1]))
        tokens_T = torch.from_numpy(batch.token_ids_T[span]).long()
        trained = torch.from_numpy(batch.loss_mask_T[span][1:] == 1)
        theirs_P = torch.from_numpy(batch.log_probabilities_T[span][1:])[trained]
        ours_P = stock_log_probabilities(directory, tokens_T, batch.samples[sample].temperature)[trained]
        difference_P = (ours_P - theirs_P).double()
        expected.append((difference_P.exp() - 1 - difference_P).numpy())
    lone = make_lone_run(tmp_path, directory, {"router_replay": False})
    metrics = lone.train(batch)
    assert metrics["mismatch_kl"] == pytest.approx(np.concatenate(expected).mean(), rel=1e-4)


@pytest.mark.slow
def test_the_probe_of_a_model_whose_layers_look_back_is_of_one_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.probe._clearest", lambda *_: 5)  # not the first, which would see no other in any case
    directory = save(LOOKING_BACK["lfm2"](), tmp_path / "model")
    lone = make_lone_run(tmp_path, directory, lora={"rank": 2, "target_modules": ["q_proj"]})
    Broadcaster(lone.learner.manager, tmp_path, "default", str(directory), 2).publish(
        lone.model, lone.learner.loaded.replay, lone.run
    )
    probe = json.loads((tmp_path / "run_default" / "broadcast" / "step_0" / "probe.json").read_text())
    expected = stock_log_probabilities(directory, torch.tensor(probe["token_ids"]))
    torch.testing.assert_close(torch.tensor(probe["log_probabilities"]), expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "moe", "windowed", "llama"])
def test_a_model_that_keeps_samples_apart_is_packed(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, dtype: str
) -> None:
    directory = (
        save(LlamaConfig(**_SHAPE), tmp_path) if kind == "llama" else request.getfixturevalue(f"{kind}_directory")
    )
    model = load_model(directory, dtype, CPU)
    before = model.config.to_json_string()
    prove_packing(model)
    assert can_pack(model)
    assert model.config.to_json_string() == before, "what is published would say something else"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: GptOssConfig(**_SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2), "attention sinks"),
        (lambda: Gemma2Config(**_SHAPE, head_dim=8), "soft-capped scores"),
        (
            lambda: BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
            "it does not use transformers' attention interface",
        ),
    ],
)
def test_a_model_that_would_be_another_function_is_refused(
    tmp_path: Path, make: Callable[[], PretrainedConfig], reason: str
) -> None:
    model = load_model(save(make(), tmp_path), "float32", CPU)
    with pytest.raises(ValueError, match=f"cannot be trained: .*{reason}"):
        prove_packing(model)


def test_attention_that_computes_something_else_is_refused(
    dense_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a model's mask says what ours does not: here, its scores are scaled otherwise."""
    model = load_model(dense_directory, "float32", CPU)
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            forward = module.forward

            def scaled(*arguments: Any, forward: Any = forward, module: Any = module, **more: Any) -> Any:
                ours = model.config._attn_implementation == "per_sample"
                monkeypatch.setattr(module, "scaling", 0.2 if ours else 0.35)
                return forward(*arguments, **more)

            monkeypatch.setattr(module, "forward", scaled)
    with pytest.raises(ValueError, match=r"log-probabilities of a sample differ\s+from those of transformers by"):
        prove_packing(model)


def test_one_sample_a_row_changes_nothing_where_samples_are_kept_apart(moe_directory: Path, tmp_path: Path) -> None:
    """With the routing of each sample where it belongs."""
    lone, packed = (make_lone_run(tmp_path / name, moe_directory) for name in ("lone", "packed"))
    lone.model.one_sample_a_row = True
    lone.learner.loaded.rows.max_tokens = 1
    batch = make_batch(1, routed=True)
    one, many = lone.train(batch), packed.train(batch)
    assert one["replayed_share"] == 1.0
    for name in many.keys() - {"phase/train", "tokens_per_second"}:
        assert one[name] == pytest.approx(many[name], rel=1e-5, abs=1e-6)
