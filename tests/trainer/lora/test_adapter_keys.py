"""Every key of PEFT's `LoraConfig`: a run begins with what PEFT makes of such an adapter's files, or refuses it by the key."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from counterpoint.run.adapter_description import COMPARED, PLAIN, WITHOUT_EFFECT, read_description
from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.lora.adapter_file import load_adapter
from counterpoint.trainer.lora.multi_lora import adapter_spans, apply_lora_to_model, peft_state
from counterpoint.trainer.model.load import load_model
from tests.trainer.lora.test_multi_lora import CPU, admit
from tests.trainer.model.test_load import run

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # peft is imported, and warns of most keys

MODULES = ["q_proj", "down_proj"]
RANK, ALPHA = 2, 4.0
TOKENS = torch.arange(5, 21)
ROUNDING = 1e-4
"""Nats, in float32."""

MADE: list[tuple[str, Any, bool]] = [
    ("task_type", None, True),
    ("task_type", "FEATURE_EXTRACTION", True),
    ("auto_mapping", {"base_model_class": "Qwen3ForCausalLM"}, True),
    ("peft_version", "0.5.0", True),
    ("base_model_name_or_path", "somebody/model", True),
    ("revision", "main", True),
    ("inference_mode", True, True),
    ("r", 3, False),
    ("lora_alpha", 3, False),
    ("target_modules", r".*\.(q_proj|down_proj)", True),
    ("target_modules", ["q_proj"], False),
    ("exclude_modules", ["layers.1.self_attn.q_proj"], False),
    ("exclude_modules", r".*layers\.0.*", False),
    ("exclude_modules", [], True),
    ("exclude_modules", ["k_proj", "lm_head"], True),
    ("exclude_modules", ["proj"], True),
    ("lora_dropout", 0.5, True),
    ("fan_in_fan_out", True, True),
    ("bias", "all", False),
    ("bias", "lora_only", False),
    ("use_rslora", True, False),
    ("modules_to_save", ["lm_head"], False),
    ("modules_to_save", [], True),
    ("init_lora_weights", False, True),
    ("init_lora_weights", "gaussian", True),
    ("init_lora_weights", "orthogonal", True),
    ("init_lora_weights", "eva", True),
    ("init_lora_weights", "mica", True),
    ("init_lora_weights", "lora_ga", True),
    ("init_lora_weights", "pissa", False),
    ("init_lora_weights", "pissa_niter_4", False),
    ("init_lora_weights", "olora", False),
    ("init_lora_weights", "OLoRA", False),
    ("layers_to_transform", [1], False),
    ("layers_to_transform", [], True),
    ("rank_pattern", {"q_proj": 1}, False),
    ("rank_pattern", {r"layers\.1\..*": 4}, False),
    ("alpha_pattern", {"down_proj": 2}, False),
    ("trainable_token_indices", [5, 6], False),
    ("loftq_config", {"loftq_bits": 4, "loftq_iter": 1}, True),
    ("eva_config", {"rho": 1.5}, True),
    ("corda_config", {"corda_method": "kpm"}, True),
    ("lora_ga_config", {"direction": "random"}, True),
    ("use_dora", True, False),
    ("velora_config", {"num_groups": 4, "init_type": "random"}, False),
    ("alora_invocation_tokens", [9, 10], False),
    ("alora_invocation_tokens", [], True),
    ("use_qalora", True, False),
    ("qalora_group_size", 8, True),
    ("monteclora_config", {"num_samples": 2}, False),
    ("layer_replication", [[0, 2], [1, 2]], False),
    ("lora_bias", True, False),
    ("target_parameters", ["up_proj.weight"], False),
    ("use_bdlora", {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["down_proj"], "nblocks": 2}, False),
    ("kasa_config", {"beta": 0.1}, False),
    ("ensure_weight_tying", True, True),
]
"""A key, its value in a `LoraConfig` from which PEFT makes an adapter, and whether a run may begin with that."""

WRITTEN: list[tuple[str, Any, bool]] = [
    ("peft_type", "LOHA", False),
    ("init_lora_weights", "corda", False),
    ("init_lora_weights", "loftq", False),
    ("init_lora_weights", "of a later PEFT", False),
    ("layers_pattern", "layers", False),
    ("exclude_modules", 5, False),
    ("trainable_token_indices", {}, True),
    ("megatron_config", {}, True),
    ("use_bdlora", False, False),
    ("target_modules", ["q_proj"], False),
    ("target_modules", None, False),
    ("megatron_config", {"tensor_model_parallel_size": 1}, False),
    ("megatron_core", "another.core", True),
    ("runtime_config", {"ephemeral_gpu_offload": True}, True),
    ("arrow_config", {"top_k": 1}, False),
    ("later_key", {"of": "PEFT"}, False),
    ("later_key", 0, False),
    ("later_key", None, True),
]
"""The same for a value that is written into the description of a plain adapter, since PEFT makes no such adapter here."""


def make(model: Path, directory: Path, **keys: Any) -> Path:
    """Saves an adapter as PEFT's users make one, with weights that all matter."""
    import peft

    torch.manual_seed(1)
    known: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "target_modules": MODULES, "task_type": "CAUSAL_LM"}
    adapted = peft.get_peft_model(load_model(model, "float32", CPU), peft.LoraConfig(**known | keys))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name or "token_adapter" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    adapted.save_pretrained(str(directory))
    return directory


def by_peft(model: Path, directory: Path) -> Tensor:
    """The log-probabilities of the adapter as PEFT loads it."""
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(load_model(model, "float32", CPU), str(directory)).eval()
    with torch.no_grad():
        return run(loaded, TOKENS, [len(TOKENS)])


def by_trainer(model: Path, directory: Path, rank: int = RANK, alpha: float = ALPHA) -> Tensor:
    """The log-probabilities of a run that begins with the adapter. Raises `ValueError`."""
    config = LoraConfig(rank=rank, alpha=alpha, target_modules=MODULES)
    trained = load_model(model, "float32", CPU)
    layers = apply_lora_to_model(trained, 2, config)
    admit(layers, 1, config)
    load_adapter(lambda: peft_state(layers, 1), config, directory)
    with torch.no_grad(), adapter_spans(trained, [(1, len(TOKENS))]):
        return run(trained, TOKENS, [len(TOKENS)])


def rewrite(directory: Path, **keys: Any) -> None:
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def apart(model: Path, directory: Path, **config: Any) -> float:
    return float((by_peft(model, directory) - by_trainer(model, directory, **config)).abs().max())


def test_every_key_of_peft_has_one_row_and_a_case() -> None:
    from peft import LoraConfig as Theirs

    fields = {field.name for field in dataclasses.fields(Theirs)}
    rows = [*WITHOUT_EFFECT, *COMPARED, *PLAIN]
    assert sorted(rows) == sorted(fields), "a new PEFT has other keys: read what they mean"
    assert {key for key, _, _ in [*MADE, *WRITTEN]} == fields | {"later_key"}


@pytest.mark.parametrize(("key", "value", "taken"), MADE, ids=str)
def test_an_adapter_of_peft_begins_a_run_as_peft_loads_it_or_is_refused_by_its_key(
    dense_directory: Path, tmp_path: Path, key: str, value: Any, taken: bool
) -> None:
    given = make(dense_directory, tmp_path / "given", **{key: value})
    if taken:
        assert apart(dense_directory, given) < ROUNDING
    else:
        with pytest.raises(ValueError, match=rf"\b{key}\b"):
            by_trainer(dense_directory, given)


@pytest.mark.parametrize(("key", "value", "taken"), WRITTEN, ids=str)
def test_a_key_that_is_written_into_a_plain_description_is_honoured_or_refused(
    dense_directory: Path, tmp_path: Path, key: str, value: Any, taken: bool
) -> None:
    given = make(dense_directory, tmp_path / "given")
    rewrite(given, **{key: value})
    if taken:
        assert apart(dense_directory, given) < ROUNDING
    else:
        with pytest.raises(ValueError, match=rf"\b{key}\b"):
            by_trainer(dense_directory, given)


def test_what_is_refused_is_another_function_in_peft(dense_directory: Path, tmp_path: Path) -> None:
    """With plain LoRA's names and shapes, so that nothing else would refuse it."""
    for key, value in (("init_lora_weights", "pissa"), ("use_rslora", True), ("alora_invocation_tokens", [9, 10])):
        given = make(dense_directory, tmp_path / key, **{key: value})
        theirs = by_peft(dense_directory, given)
        rewrite(given, **{key: PLAIN[key][0][0] if key != "alora_invocation_tokens" else None})
        assert float((theirs - by_trainer(dense_directory, given)).abs().max()) > 0.1, key


def test_the_ways_out_lead_to_the_same_function(dense_directory: Path, tmp_path: Path) -> None:
    import peft

    scaled = make(dense_directory, tmp_path / "scaled", use_rslora=True)
    theirs = by_peft(dense_directory, scaled)
    rewrite(scaled, use_rslora=False, lora_alpha=ALPHA * math.sqrt(RANK))
    torch.testing.assert_close(
        by_trainer(dense_directory, scaled, alpha=ALPHA * math.sqrt(RANK)), theirs, rtol=0, atol=ROUNDING
    )

    torch.manual_seed(1)
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=MODULES, init_lora_weights="pissa")
    adapted = peft.get_peft_model(load_model(dense_directory, "float32", CPU), config)
    adapted.save_pretrained(str(tmp_path / "initial"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter += 0.3 * torch.randn_like(parameter)
        trained = run(adapted.eval(), TOKENS, [len(TOKENS)])
    adapted.save_pretrained(
        str(tmp_path / "converted"), path_initial_model_for_weight_conversion=str(tmp_path / "initial")
    )
    begun = by_trainer(dense_directory, tmp_path / "converted", rank=2 * RANK, alpha=2 * ALPHA)
    torch.testing.assert_close(begun, trained, rtol=0, atol=ROUNDING)

    for key in ("rank_pattern", "alpha_pattern"):
        given = make(dense_directory, tmp_path / key, **{key: {"q_proj": 1}})
        loaded = peft.PeftModel.from_pretrained(load_model(dense_directory, "float32", CPU), str(given))
        peft.save_as_lora(str(tmp_path / f"{key}-plain"), loaded, rank=32)
        begun = by_trainer(dense_directory, tmp_path / f"{key}-plain", rank=32, alpha=32.0)
        torch.testing.assert_close(begun, by_peft(dense_directory, given), rtol=0, atol=ROUNDING)

    merged_keys: dict[str, Any] = {"use_dora": True, "modules_to_save": ["lm_head"], "layers_to_transform": [1]}
    for key, value in merged_keys.items():
        given = make(dense_directory, tmp_path / key, **{key: value})
        loaded = peft.PeftModel.from_pretrained(load_model(dense_directory, "float32", CPU), str(given))
        merged = loaded.merge_and_unload()
        with torch.no_grad():
            begun = run(merged, TOKENS, [len(TOKENS)])
        torch.testing.assert_close(begun, by_peft(dense_directory, given), rtol=0, atol=ROUNDING)


def test_a_file_of_more_layers_than_its_description_names_is_refused(dense_directory: Path, tmp_path: Path) -> None:
    given = make(dense_directory, tmp_path / "given")
    whole = load_file(given / "adapter_model.safetensors")
    extra = {name.replace("q_proj", "k_proj"): tensor.clone() for name, tensor in whole.items() if "q_proj" in name}
    save_file(whole | extra, given / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"has 4 more, such as .*k_proj"):
        by_trainer(dense_directory, given)


def test_an_adapter_that_peft_itself_loads_otherwise_is_named(
    dense_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read_description(make(dense_directory, tmp_path / "given", init_lora_weights="lora_ga"))
    assert "LoRA-GA changes the base model" in caplog.text
