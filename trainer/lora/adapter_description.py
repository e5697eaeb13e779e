"""Checks the description of an adapter in PEFT's format (`adapter_config.json`) against a run's. It needs no torch.

The file is not trusted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from run.config import LoraConfig
from transport.files.untrusted import read_json

MAX_DESCRIPTION_BYTES = 2**20

_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
}
"""Keys of `adapter_config.json` that change the meaning of the weights, and their values in plain LoRA."""


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
    for key, plain in _PLAIN.items():
        if description.get(key) not in plain:
            raise ValueError(f"the adapter has {key} = {description[key]!r}; expected {plain[0]!r}")
