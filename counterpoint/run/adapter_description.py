"""The description of an adapter in PEFT's format, `adapter_config.json`: makes it, and checks a given one. It needs no torch.

A given file is not trusted. What its keys mean was read in PEFT 0.21: a key may make the same two matrices another function, or
change the base model while PEFT loads them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from counterpoint.run.trained import LoraConfig
from counterpoint.transport.files.untrusted import read_json

logger = logging.getLogger(__name__)

MAX_DESCRIPTION_BYTES = 2**20

_FUSED = r"experts\.gate_up_proj"
"""PEFT's pattern for the weight in which transformers has two projections of each expert, with an adapter for each of the two."""

WITHOUT_EFFECT = frozenset({
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout",
    "fan_in_fan_out", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config", "ensure_weight_tying",
})  # fmt: skip
"""Keys that change nothing of what PEFT computes with the adapter of a linear layer, whatever their value.

They say how it was made or where it belongs, or belong to a key of `PLAIN`. PEFT sets `fan_in_fan_out` to False for a linear
layer, and ties the adapters of embeddings alone, which a run has not.
"""

COMPARED = frozenset({
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters", "exclude_modules",
})  # fmt: skip
"""Keys that are compared with the run's configuration, or with the tensors."""

_MERGE = "merge it into its base model by PEFT's merge_and_unload(), and take that as the model"
_ALL_LAYERS = f"a run's adapter has all layers of its target_modules; {_MERGE}"
_ANEW = "train a plain adapter"
_CONVERT = (
    "convert it by PEFT's save_as_lora(DIRECTORY, model, rank=...), which gives all layers one rank and one scale"
)

PLAIN: dict[str, tuple[tuple[Any, ...], str]] = {
    "peft_type": (("LORA",), _MERGE),
    "init_lora_weights": (
        (True, False, None, "gaussian", "orthogonal", "eva", "mica", "lora_ga"),
        "PEFT changes the base model, too, when it loads such an adapter; save it by PEFT's save_pretrained(DIRECTORY, "
        "path_initial_model_for_weight_conversion=THE_ADAPTER_BEFORE_TRAINING), and give training.lora twice its rank and alpha",
    ),
    "use_rslora": (
        (False, None),
        "its scale is lora_alpha / sqrt(r); set use_rslora to false and lora_alpha to lora_alpha * sqrt(r) in the file, "
        "which is the same adapter",
    ),
    "use_dora": ((False, None), _MERGE),
    "bias": (("none", None), _MERGE),
    "lora_bias": ((False, None), _ANEW),
    "modules_to_save": (([], None), _MERGE),
    "trainable_token_indices": (({}, None), _MERGE),
    "layers_to_transform": (([], None), _ALL_LAYERS),
    "layers_pattern": (([], "", None), _ALL_LAYERS),
    "layer_replication": (([], None), f"PEFT repeats layers of the base model; {_ANEW}"),
    "alora_invocation_tokens": (([], None), f"it counts only after these tokens; {_ANEW}"),
    "use_qalora": ((False, None), f"it belongs to quantized layers; {_ANEW}"),
    "use_bdlora": ((None,), _MERGE),
    "velora_config": ((None,), _MERGE),
    "monteclora_config": ((None,), _MERGE),
    "kasa_config": ((None,), _MERGE),
    "arrow_config": ((None,), "it chooses among other adapters; begin with one of them"),
    "megatron_config": (({}, None), "save the adapter over transformers' model"),
}  # fmt: skip
"""Keys that make something else than plain LoRA of the tensors: their values in plain LoRA, and what else to do."""


def describe(
    config: LoraConfig, base_model: str, target_modules: Iterable[str], target_parameters: Iterable[str]
) -> dict[str, Any]:
    """Returns the description of an adapter of these layers, for JSON: modules, and weights that are adapted by themselves.

    vLLM goes by the names of the tensors alone.
    """
    parameters = sorted(set(target_parameters))
    description: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(set(target_modules)),
        "inference_mode": True,
    }
    if parameters:
        description |= {"target_parameters": parameters, **_patterns(config.rank, config.alpha)}
    return description


def _patterns(rank: float, alpha: float) -> dict[str, dict[str, float]]:
    return {"rank_pattern": {_FUSED: 2 * rank}, "alpha_pattern": {_FUSED: 2 * alpha}}


def read_description(directory: Path) -> dict[str, Any]:
    """Returns the description in `directory`.

    Raises `ValueError` if a key of it means more than plain LoRA, or is unknown; `OSError` if it cannot be read.
    """
    description = read_json(directory / "adapter_config.json", MAX_DESCRIPTION_BYTES)
    for key, value in description.items():
        if key in PLAIN:
            plain, instead = PLAIN[key]
            if value not in plain:
                raise ValueError(f"the adapter has {key} = {value!r}; expected {plain[0]!r}: {instead}")
        elif key not in WITHOUT_EFFECT | COMPARED and repr(value) not in ("None", "False", "[]", "{}"):  # 0 is no False
            raise ValueError(
                f"the adapter has {key} = {value!r}, a key that PEFT 0.21 does not have, so that its meaning is unknown; remove "
                "it from adapter_config.json if it says nothing about the weights"
            )
    if "peft_type" not in description:
        raise ValueError("the adapter has no peft_type; expected 'LORA'")
    if description.get("init_lora_weights") == "lora_ga":
        logger.warning(
            "%s: init_lora_weights = 'lora_ga': LoRA-GA changes the base model in training, and PEFT loads the adapter over the "
            "unchanged one, as is done here; if it was not converted when it was saved, it is not what was trained",
            directory,
        )
    return description


def check_description(directory: Path, config: LoraConfig) -> dict[str, Any]:
    """Compares the description in `directory` with a run's configuration, and returns it.

    Raises `ValueError` if it is not plain LoRA of that rank and alpha, `OSError` if it cannot be read.
    """
    description = read_description(directory)
    for key, name, wanted in (("r", "rank", config.rank), ("lora_alpha", "alpha", config.alpha)):
        if description.get(key) != wanted:
            raise ValueError(
                f"the adapter has {key} = {description.get(key)!r}, and training.lora.{name} = {wanted:g}; they must be the same"
            )
    require_one_scale(description)
    return description


def require_one_scale(description: Mapping[str, Any]) -> None:
    """Raises `ValueError` unless all layers have one rank and one scale."""
    for key in ("r", "lora_alpha"):
        value = description.get(key)
        if not isinstance(value, int | float) or not value > 0:
            raise ValueError(f"the adapter has {key} = {value!r}; expected a number above 0")
    # Both or none: one of them alone is another scale of these layers.
    usual = _patterns(description["r"], description["lora_alpha"])
    given = {key: description.get(key) or {} for key in usual}
    if any(given.values()) and given != usual:
        raise ValueError(
            f"the adapter has {' and '.join(f'{key} = {each!r}' for key, each in given.items())}; {_CONVERT}"
        )


def require_targets(description: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises `ValueError` for a tensor of a layer that PEFT would leave bare, by the description's lists of layers.

    A pattern of targets is not run, since it may take any time, and weights that are named by themselves are not told from
    layers.
    """
    targets, excluded = (description.get(key) or [] for key in ("target_modules", "exclude_modules"))
    if not isinstance(excluded, list):
        raise ValueError(
            f"it has exclude_modules = {excluded!r}; expected a list of layers, of which the adapter has none"
        )
    layers = {name: name.rpartition(".lora_")[0].removeprefix("base_model.model.") for name in names}
    for name, layer in layers.items():
        if _is_named(layer, excluded):
            raise ValueError(f"it has {name}, of a layer that its exclude_modules = {excluded!r} leave out")
    if isinstance(targets, str) or description.get("target_parameters"):
        return
    for name, layer in layers.items():
        if not (isinstance(targets, list) and _is_named(layer, targets)):
            raise ValueError(f"it has {name}, of a layer that its target_modules = {targets!r} do not name")


def _is_named(layer: str, names: list[Any]) -> bool:
    """Whether PEFT finds a layer in a list: by its whole name, or the end of it."""
    return layer in names or layer.endswith(tuple(f".{each}" for each in names))
