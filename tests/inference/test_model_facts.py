"""What config.json says of how a model can be served: what it decides is a bound, and what it does not decide is not guessed."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson
import pytest

from counterpoint.inference.config import InferenceConfig, LoraServingConfig
from counterpoint.inference.model_facts import attention_heads, kept_bytes, longest_context
from counterpoint.inference.server import ALLOW_LONG, check_configuration, server_command, server_environment
from counterpoint.models.tiny_models import ARCHITECTURES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 1024}, 1024),
        ({"max_position_embeddings": 1024, "rope_scaling": None}, 1024),
        ({"max_position_embeddings": 1024, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1024),
        ({"text_config": {"max_position_embeddings": 4096}, "vision_config": {"max_position_embeddings": 64}}, 4096),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, None),
        ({"text_config": {"max_position_embeddings": 32768, "rope_parameters": {"full_attention": YARN}}}, None),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"n_positions": 1024}, None),
        ({}, None),
    ],
)
def test_what_a_configuration_decides(config: dict[str, Any], longest: int | None) -> None:
    assert longest_context(config) == longest


def test_a_longer_context_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_LONG, raising=False)
    (tmp_path / "config.json").write_bytes(orjson.dumps({"max_position_embeddings": 1024}))

    def check(**values: Any) -> None:
        check_configuration(InferenceConfig(model=str(tmp_path), **values))

    check(max_model_len=1024)
    with pytest.raises(ValueError, match=r"^max_model_len = 1025: .* 1024 tokens \(max_position"):
        check(max_model_len=1025)
    with pytest.raises(ValueError, match=r"^max_model_len = 2048, .*max_model_len to 1024 "):
        check()
    check(extra_args=["--hf-overrides={}"])
    monkeypatch.setenv(ALLOW_LONG, "1")
    check()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")  # vLLM imports these for a new model
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e6}},
        {"rope_parameters": YARN | {"original_max_position_embeddings": 256, "rope_theta": 1e6}},
        {"model_max_length": 4096},
        {"max_position_embeddings": 512, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0},
    ],
)
def test_vllm_refuses_whatever_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A longer context than ours allows is never one that vLLM takes."""
    from vllm.config import ModelConfig

    write_model(tmp_path, changes)
    longest = longest_context(orjson.loads((tmp_path / "config.json").read_bytes()))

    def starts(max_model_len: int) -> bool:
        try:
            ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=max_model_len)
        except ValueError as error:
            if "max_model_len" not in str(error):
                raise
            return False
        return True

    if longest is None:
        assert starts(changes.get("max_position_embeddings", 1024) * 2 if "yarn" not in str(changes) else 1024)
    else:
        assert starts(longest)
        assert not starts(longest + 1)


def test_a_model_that_cannot_be_divided_over_so_many_gpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(orjson.dumps({"num_attention_heads": 6, "vision_config": {}}))

    def check(ranks: int, **values: Any) -> None:
        check_configuration(InferenceConfig(model=str(tmp_path), tensor_parallel_size=ranks, **values))

    for ranks in (1, 2, 3, 6):
        check(ranks)
    for ranks in (4, 12):
        with pytest.raises(ValueError, match=rf"^tensor_parallel_size = {ranks}: .* 6 attention heads .*6$"):
            check(ranks)
    check(4, extra_args=["--hf-overrides={}"])


@pytest.mark.parametrize(
    ("text", "reason"), [({"num_experts": 4}, "a mixture"), ({"layer_types": ["linear_attention"]}, "linear attention")]
)
@pytest.mark.parametrize("whole", [True, False])
def test_adapters_that_a_cpu_does_not_serve_are_refused(
    tmp_path: Path, text: dict[str, Any], reason: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a vision-language model says it of its part for text."""
    monkeypatch.setattr("counterpoint.inference.server.on_cpu", lambda: True)
    (tmp_path / "config.json").write_bytes(orjson.dumps(text if whole else {"text_config": text}))
    with pytest.raises(ValueError, match=reason):
        check_configuration(InferenceConfig(model=str(tmp_path), lora=LoraServingConfig()))
    check_configuration(InferenceConfig(model=str(tmp_path)))


@pytest.mark.parametrize("config", [{}, {"num_attention_heads": "many"}, {"text_config": {}, "num_attention_heads": 3}])
def test_heads_that_a_configuration_does_not_name_are_not_guessed(config: dict[str, Any]) -> None:
    assert attention_heads(config) is None


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
def test_vllm_divides_heads_as_is_expected_here(tmp_path: Path) -> None:
    from vllm.config import ModelConfig, ParallelConfig

    write_model(tmp_path, {})
    heads = attention_heads(orjson.loads((tmp_path / "config.json").read_bytes()))
    assert heads is not None
    served = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True)
    for ranks in range(1, heads + 1):
        parallel = ParallelConfig()
        parallel.tensor_parallel_size = ranks  # a real one would look for as many devices
        refused = pytest.raises(ValueError, match="attention heads") if heads % ranks else nullcontext()
        with refused:
            served.verify_with_parallel_config(parallel)


def write_model(directory: Path, changes: dict[str, Any]) -> None:
    """Writes the configuration of the built-in dense model, with `changes`."""
    from transformers import Qwen3Config

    Qwen3Config(**ARCHITECTURES["tiny-dense"] | changes, architectures=["Qwen3ForCausalLM"]).save_pretrained(directory)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, 2 * 2 * 2 * 32 * 4),
        ({"num_key_value_heads": None}, 2 * 2 * 4 * 32 * 4),
        ({"head_dim": None}, 2 * 2 * 2 * 16 * 4),
        ({"layer_types": ["full_attention", "full_attention"]}, 2 * 2 * 2 * 32 * 4),
        ({"layer_types": ["full_attention", "sliding_attention"]}, None),
        ({"use_sliding_window": True}, None),
        ({"model_type": "qwen3_next"}, None),
        ({"num_hidden_layers": "many"}, None),
    ],
)
def test_the_bytes_of_a_token_in_the_cache(change: dict[str, Any], kept: int | None) -> None:
    model = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    assert kept_bytes(model | {"num_key_value_heads": 2, "head_dim": 32} | change) == kept


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"max_num_seqs": 8}, 1024 * 4 * 8 * 128),
        ({"max_num_seqs": 8192}, 2**30),
        ({"max_num_seqs": 8, "kv_cache_gib": 2}, 2**31),
        ({"max_num_seqs": 8, "extra_args": ["--kv_cache_memory_bytes", "7"]}, 7),
    ],
)
def test_a_server_on_a_cpu_gets_no_larger_cache_than_it_has_a_use_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], given: int
) -> None:
    model = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}
    (tmp_path / "config.json").write_bytes(orjson.dumps(model | {"max_position_embeddings": 1024}))
    monkeypatch.setattr("counterpoint.inference.server.on_cpu", lambda: True)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    config = InferenceConfig(model=str(tmp_path), max_model_len=128, **settings)
    command = [word.replace("_", "-") for word in server_command(config)]
    assert command.count("--kv-cache-memory-bytes") == 1
    assert int(command[command.index("--kv-cache-memory-bytes") + 1]) == given
    assert "VLLM_CPU_KVCACHE_SPACE" not in server_environment(config), "it would replace the flag"
