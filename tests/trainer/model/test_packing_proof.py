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
    AfmoeConfig,
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    DeepseekV32Config,
    DogeConfig,
    FalconConfig,
    FalconH1Config,
    Gemma2Config,
    GPTJConfig,
    GPTNeoConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    JetMoeConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MptConfig,
    NemotronConfig,
    PretrainedConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    RobertaConfig,
    RoFormerConfig,
    StableLmConfig,
)
from transformers.models.qwen3 import modeling_qwen3

from counterpoint.trainer.broadcast import Broadcaster
from counterpoint.trainer.model.attention_proof import row
from counterpoint.trainer.model.load import load_model
from counterpoint.trainer.model.packing_proof import can_pack, can_share_prompts, prove_packing
from tests.trainer.conftest import VOCABULARY, make_batch
from tests.trainer.lone_run import make_lone_run

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


def stock_log_probabilities(
    directory: Path, token_ids: Tensor, temperature: float = 1.0, attention: str | None = "eager"
) -> Tensor:
    """As transformers computes one sample by itself."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention).eval()
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
def test_the_probe_of_a_model_whose_layers_look_back_is_of_one_sample(tmp_path: Path) -> None:
    directory = save(LOOKING_BACK["lfm2"](), tmp_path / "model")
    lone = make_lone_run(tmp_path, directory, lora={"rank": 2, "target_modules": ["q_proj"]})
    Broadcaster(lone.learner.manager, tmp_path, "default", str(directory), 2).publish(lone.model, lone.run)
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
@pytest.mark.parametrize("kind", LOOKING_BACK)
def test_an_influence_that_is_as_small_as_rounding_is_found(tmp_path: Path, kind: str) -> None:
    """As with the spread that transformers gives new weights; training would make it larger."""
    config = LOOKING_BACK[kind]()
    config.initializer_range = 0.002
    directory = save(config, tmp_path / "model")
    for dtype in ("float32", "bfloat16"):
        model = load_model(directory, dtype, CPU)
        prove_packing(model)
        assert not can_pack(model), dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_influence_by_a_gate_that_is_still_zero_is_found(
    dense_directory: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    model: Any = load_model(dense_directory, dtype, CPU)
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    monkeypatch.setattr(mlp, "forward", lambda hidden: forward(hidden) + 0.0 * hidden.roll(1, 1))
    prove_packing(model)
    assert not can_pack(model)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_an_influence_by_token_ids_alone_is_found(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As of embeddings of the ids of several tokens in turn."""
    model: Any = load_model(request.getfixturevalue(f"{kind}_directory"), "bfloat16", CPU)
    forward, layer = model.forward, model.model.layers[1]
    inner = layer.forward
    ids: list[Tensor] = []

    def called(*arguments: Any, input_ids: Tensor, **more: Any) -> Any:
        ids[:] = [input_ids]
        return forward(*arguments, input_ids=input_ids, **more)

    def added(hidden: Tensor, *arguments: Any, **more: Any) -> Any:
        return inner(hidden + 0.1 * model.model.embed_tokens.weight[ids[0].roll(1, 1)], *arguments, **more)

    monkeypatch.setattr(model, "forward", called)
    monkeypatch.setattr(layer, "forward", added)
    prove_packing(model)
    assert not can_pack(model)


def test_samples_do_not_share_a_row_where_the_model_counts_positions_itself(
    dense_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = load_model(dense_directory, "float32", CPU)
    forward, places = model.model.embed_tokens.forward, torch.randn(64, 1)
    monkeypatch.setattr(model.model.embed_tokens, "forward", lambda ids: forward(ids) * (1 + places[: ids.shape[-1]]))
    prove_packing(model)
    assert not can_pack(model)


def test_prompts_are_not_shared_where_a_layer_tells_samples_apart_by_their_positions(
    dense_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a layer keeps packed samples apart, but the rest of a sample after a shared prompt does not begin at 0."""
    model: Any = load_model(dense_directory, "float32", CPU)
    forward, layer = model.forward, model.model.layers[0]
    positions: list[Tensor] = []
    inner = layer.forward

    def called(*arguments: Any, input_ids: Tensor, position_ids: Tensor | None = None, **more: Any) -> Any:
        positions[:] = [torch.arange(input_ids.shape[1])[None] if position_ids is None else position_ids]
        return forward(*arguments, input_ids=input_ids, position_ids=position_ids, **more)

    def added(hidden: Tensor, *arguments: Any, **more: Any) -> Any:
        before = torch.where(positions[0][..., None] > 0, hidden.roll(1, 1), 0.0)
        return inner(hidden + 1e-4 * before, *arguments, **more)

    monkeypatch.setattr(model, "forward", called)
    monkeypatch.setattr(layer, "forward", added)
    prove_packing(model)
    assert can_pack(model)
    assert not can_share_prompts(model)


SMALL_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 1,
}
OF_THEIR_OWN: dict[str, Callable[[], PretrainedConfig]] = {
    "bloom": lambda: BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.2, bos_token_id=None
    ),
    "falcon": lambda: FalconConfig(**_SHAPE, alibi=True),
    "gpt_neo": lambda: GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        initializer_range=0.2, bos_token_id=None, eos_token_id=1,
    ),
    "gptj": lambda: GPTJConfig(**SMALL_GPT, rotary_dim=8),
    "mpt": lambda: MptConfig(
        vocab_size=VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, initializer_range=0.2
    ),
    "nemotron": lambda: NemotronConfig(**_SHAPE, head_dim=8),
    "stablelm": lambda: StableLmConfig(**_SHAPE),
}  # fmt: skip
"""Models that take no attention but their own, or do not pass the lengths of samples on to it."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", OF_THEIR_OWN)
def test_a_model_with_attention_of_its_own_is_trained_one_sample_a_row(tmp_path: Path, kind: str, dtype: str) -> None:
    directory = save(OF_THEIR_OWN[kind](), tmp_path / "model")
    model = load_model(directory, dtype, CPU)
    prove_packing(model)
    assert not can_pack(model)
    tokens_T = torch.randint(0, VOCABULARY, (20,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        (ours_P,) = row(model, [tokens_T])
    # Falcon's `eager` adds its biases twice, so transformers' choice is asked.
    expected_P = stock_log_probabilities(directory, tokens_T, attention=None)
    torch.testing.assert_close(ours_P, expected_P, rtol=0, atol=1e-5 if dtype == "float32" else 0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: AfmoeConfig(
            **_SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, num_dense_layers=1
        ),
        lambda: JetMoeConfig(
            **{**_SHAPE, "num_key_value_heads": 4}, kv_channels=8, num_local_experts=4, num_experts_per_tok=2
        ),
    ],
    ids=["afmoe", "jetmoe"],
)
def test_a_model_that_views_what_attention_returns_is_packed(
    tmp_path: Path, make: Callable[[], PretrainedConfig]
) -> None:
    model = load_model(save(make(), tmp_path), "float32", CPU)
    prove_packing(model)
    assert can_pack(model)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: GptOssConfig(**_SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2), "attention sinks"),
        (lambda: Gemma2Config(**_SHAPE, head_dim=8), "soft-capped scores"),
        (lambda: DogeConfig(**_SHAPE), "attention_mask of its own"),
        (
            lambda: DeepseekV32Config(
                **_SHAPE | {"num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
                qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
                moe_intermediate_size=16, index_n_heads=4, index_head_dim=8,
            ),
            "which has no mask",
        ),
        (lambda: BertConfig(**_SHAPE), "something else than the trainer's"),
        (lambda: RoFormerConfig(**_SHAPE), "depends on later tokens"),
        (lambda: RobertaConfig(**_SHAPE, is_decoder=True), "positions that do not begin at 0"),
    ],
    ids=["gpt-oss", "gemma2", "doge", "deepseek_v32", "bert", "roformer", "roberta"],
)  # fmt: skip
def test_a_model_that_would_be_another_function_is_refused(
    tmp_path: Path, make: Callable[[], PretrainedConfig], reason: str, dtype: str
) -> None:
    model = load_model(save(make(), tmp_path), dtype, CPU)
    with pytest.raises(ValueError, match=f"cannot be trained: .*{reason}"):
        prove_packing(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [1.01, 2.0])
def test_attention_that_computes_something_else_is_refused(
    dense_directory: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, factor: float
) -> None:
    """Here, the scores of a model's own are scaled otherwise, which weights as these hardly show."""
    model = load_model(dense_directory, dtype, CPU)
    stock = modeling_qwen3.eager_attention_forward

    def scaled(*arguments: Any, scaling: float, **more: Any) -> Any:
        return stock(*arguments, scaling=factor * scaling, **more)

    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", scaled)
    with pytest.raises(ValueError, match="attention of Qwen3Attention computes something else"):
        prove_packing(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_computes_something_else_outside_of_its_attention_is_refused(
    dense_directory: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """As one that asks for the name of its attention."""
    model: Any = load_model(dense_directory, dtype, CPU)
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    monkeypatch.setattr(
        mlp, "forward", lambda hidden: forward(hidden) * (1.01 if model.config._attn_implementation == "eager" else 1)
    )
    with pytest.raises(ValueError, match="outside of attention it computes something else"):
        prove_packing(model)
    assert model.config._attn_implementation == "per_sample"
    assert not torch.are_deterministic_algorithms_enabled()


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
