"""The description of an adapter in PEFT's format, `adapter_config.json`: makes it, and checks a given one. It needs no torch.

A given file is not trusted.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from counterpoint.run.trained import LoraConfig
from counterpoint.transport.files.untrusted import read_json

MAX_DESCRIPTION_BYTES = 2**20

_FUSED = r"experts\.gate_up_proj"
"""PEFT's pattern for the weight in which transformers has two projections of each expert, with an adapter for each of the two."""

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": ([], None),
}
"""Keys of `adapter_config.json` that change the meaning of the weights, and their values in plain LoRA."""


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
        description |= {"target_parameters": parameters, **_patterns(config)}
    return description


def _patterns(config: LoraConfig) -> dict[str, dict[str, float]]:
    return {"rank_pattern": {_FUSED: 2 * config.rank}, "alpha_pattern": {_FUSED: 2 * config.alpha}}


def check_description(directory: Path, config: LoraConfig) -> None:
    """Compares the description in `directory` with a run's configuration.

    Raises `ValueError` if it is not plain LoRA of that rank and alpha, `OSError` if it cannot be read.
    """
    description = read_json(directory / "adapter_config.json", MAX_DESCRIPTION_BYTES)
    for key, name, wanted in (("r", "rank", config.rank), ("lora_alpha", "alpha", config.alpha)):
        if description.get(key) != wanted:
            raise ValueError(
                f"the adapter has {key} = {description.get(key)!r}, and training.lora.{name} = {wanted:g}; they must be the same"
            )
    patterns: dict[str, tuple[Any, ...]] = {key: ({}, None, ours) for key, ours in _patterns(config).items()}
    for key, plain in (_PLAIN | patterns).items():
        if description.get(key) not in plain:
            raise ValueError(f"the adapter has {key} = {description[key]!r}; expected {plain[0]!r}")
