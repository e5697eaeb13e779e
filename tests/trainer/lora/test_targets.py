"""Which layers can have an adapter: all that the model uses as linear layers, and the others are refused before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    HunYuanMoEV1Config,
    JambaConfig,
    Llama4TextConfig,
    ModernBertDecoderConfig,
    PhimoeConfig,
    PretrainedConfig,
)

from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.loaded_model import LoadedModel
from counterpoint.trainer.lora.experts import MultiLoraExperts
from counterpoint.trainer.lora.multi_lora import adapter_spans, apply_lora_to_model
from counterpoint.trainer.lora.targets import adaptable, check_targets, prove_layers
from counterpoint.trainer.model.adapters.adapted_layer import MultiLora
from counterpoint.trainer.model.load import load_model
from counterpoint.trainer.ranks import Ranks
from tests.trainer.model.test_load import run

CPU = torch.device("cpu")
EVERY = LoraConfig(target_modules=[*LoraConfig().target_modules, "experts"])
_SHAPE: dict[str, int] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MODELS: dict[str, PretrainedConfig] = {
    # Its router looks at the precision of its own `wg.weight`.
    "hunyuan": HunYuanMoEV1Config(**_SHAPE, head_dim=8, num_experts=4, moe_topk=2),
    # Its state space multiplies by `dt_proj.weight`.
    "jamba": JambaConfig(
        **_SHAPE,
        num_experts=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
    ),
    # Their routers are subclasses of `nn.Linear`.
    "phimoe": PhimoeConfig(**_SHAPE, **_EXPERTS),
    "llama4": Llama4TextConfig(**_SHAPE, **_EXPERTS, head_dim=8, intermediate_size_mlp=48, use_qk_norm=False),
    # Its `dense` is part of the head, which gets the predicting tokens alone.
    "modernbert": ModernBertDecoderConfig(**_SHAPE, local_attention=32),
}


def made(name: str, directory: Path) -> Path:
    """The directory of a model, with weights so wide that all of them matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name])
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    return directory


def proven(directory: Path) -> nn.Module:
    model = load_model(directory, "float32", CPU)
    prove_layers(model)
    return model


@pytest.fixture(params=["moe", "dense"])
def directory(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(f"{request.param}_directory")
    return path


@pytest.mark.slow  # several architectures
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_that_can_have_an_adapter_changes_the_results_and_none_changes_the_bare_model(
    name: str, tmp_path: Path
) -> None:
    """Each name of a layer is a run's only target, as all of them are wrapped one after another."""
    model = proven(made(name, tmp_path))
    tokens_T = torch.randint(3, 64, (15,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        bare = run(model, tokens_T, [15])
    for slot, target in enumerate(sorted({path.rpartition(".")[2] for path in adaptable(model)})):
        config = LoraConfig(target_modules=[target])
        check_targets(model, config, 8)
        layers = apply_lora_to_model(model, 16, config)
        own = [layer for path, layer in layers.items() if path.rpartition(".")[2] == target]
        generator = torch.Generator().manual_seed(slot)
        for layer in own:
            layer.admit(slot, 4, 8.0, generator)
            for parameter in layer.adapter_parameters(slot).values():
                nn.init.normal_(parameter, std=0.5, generator=generator)
        with torch.no_grad(), adapter_spans(model, [(slot, 15)]):
            changed = run(model, tokens_T, [15])
        assert (changed - bare).abs().max() > 1e-3, target
        with torch.no_grad(), adapter_spans(model, [(15, 15)]):
            assert torch.equal(run(model, tokens_T, [15]), bare), target


@pytest.mark.slow  # several architectures
@pytest.mark.parametrize(
    ("name", "target", "reason"),
    [
        ("jamba", "dt_proj", "computes a text without calling it"),
        ("phimoe", "router", "PhimoeTopKRouter, which returns something else"),
        ("llama4", "router", "Llama4Router, which returns something else"),
        ("modernbert", "dense", "does not get all tokens of a row"),
        ("llama4", "experts", "Llama4TextExperts; expected an nn.Linear, or experts"),
        ("modernbert", "decoder", "output layer"),
    ],
)
def test_a_layer_that_is_used_otherwise_is_refused_with_the_reason(
    name: str, target: str, reason: str, tmp_path: Path
) -> None:
    model = proven(made(name, tmp_path))
    for targets in ([target], ["q_proj", target]):
        with pytest.raises(
            ValueError, match=rf"target_modules = .*{target}' cannot have an adapter: .*{reason}.*q_proj"
        ):
            check_targets(model, LoraConfig(target_modules=targets), 8)
    assert not any(
        target == path.rpartition(".")[2] for path in apply_lora_to_model(model, 2, LoraConfig(target_modules=[target]))
    )


def test_a_trainer_knows_its_layers_once_its_model_is_loaded(tmp_path: Path) -> None:
    config = TrainerConfig(
        output_dir=tmp_path, model=str(made("phimoe", tmp_path)), dtype="float32", router_replay=False
    )
    loaded = LoadedModel.load(config, Ranks(0, 1, CPU, None))
    with pytest.raises(ValueError, match="'router' cannot have an adapter"):
        check_targets(loaded.model, LoraConfig(target_modules=["router"]), 8)


def test_only_targets_are_wrapped(directory: Path) -> None:
    model = proven(directory)
    assert {
        name.rpartition(".")[2] for name in apply_lora_to_model(model, 2, LoraConfig(target_modules=["q_proj"]))
    } == {"q_proj"}
    both = apply_lora_to_model(model, 2, LoraConfig(target_modules=["o_proj"]))
    assert [name.rpartition(".")[2] for name in both] == ["q_proj", "o_proj"] * 2, "in the model's order"
    layer, base = (
        both["model.layers.0.self_attn.q_proj"],
        load_model(directory, "float32", CPU).model.layers[0].self_attn.q_proj,
    )
    assert torch.equal(layer.weight, base.weight)
    assert (layer.bias, layer.in_features, layer.out_features) == (None, base.in_features, base.out_features)


def test_targets_that_cannot_be_are_refused(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(directory, "float32", CPU)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\['query'\].* it has .*'q_proj'"):
            check_targets(model, LoraConfig(target_modules=["query"]), 8)
        with pytest.raises(ValueError, match=r"'lm_head' cannot have an adapter: .* output layer"):
            check_targets(model, LoraConfig(target_modules=["lm_head"]), 8)
        with pytest.raises(ValueError, match=r"training\.lora\.rank = 9: .* 8"):
            check_targets(model, LoraConfig(rank=9), 8)
        assert all(parameter.requires_grad for parameter in model.parameters()) or isinstance(
            model.get_submodule("model.layers.0.self_attn.q_proj"), MultiLora
        )
        caplog.clear()
        check_targets(model, LoraConfig(target_modules=["q_proj", "query"]), 8)
        assert "['query']" in caplog.text
        apply_lora_to_model(model, 4, EVERY)


def test_experts_of_another_kind_have_no_adapters(moe_directory: Path) -> None:
    model = load_model(moe_directory, "float32", CPU)
    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeExperts":
            module.is_transposed = True
    with pytest.raises(ValueError, match="it is a Qwen3MoeExperts; expected experts with a gate"):
        check_targets(model, LoraConfig(target_modules=["experts"]), 8)
    assert not any(isinstance(layer, MultiLoraExperts) for layer in apply_lora_to_model(model, 4, EVERY).values())
