"""Which class of transformers computes text by a checkpoint, and what of a vision-language model is trained: its text part alone.

A checkpoint with parts for more than text is loaded by the class that has all of them, not by that of its text part. Then each
weight has the name by which transformers, PEFT and vLLM know it in the checkpoint, and what is published has all parts. Those for
other things (`counterpoint/inference/digest.py: is_of_text`) are frozen, and published as they are in the checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from counterpoint.inference.checkpoint import INDEX, read_header, weight_files
from counterpoint.inference.digest import is_of_text


def read_config(directory: Path) -> Any:
    """Returns transformers' configuration of the checkpoint in `directory`. Raises what transformers raises."""
    return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


def has_other_parts(config: Any) -> bool:
    """Returns whether a checkpoint with this configuration has parts for more than text, and transformers a class of them all."""
    is_part = config.get_text_config(decoder=True) is not config
    return is_part and type(config) in AutoModelForImageTextToText._model_mapping


def auto_class(config: Any) -> Any:
    """Returns the one of transformers' auto classes that loads all of a checkpoint with this configuration."""
    return AutoModelForImageTextToText if has_other_parts(config) else AutoModelForCausalLM


def class_of(config: Any) -> Any:
    """Returns the class of a model with this configuration; None if transformers has none that computes text."""
    return auto_class(config)._model_mapping.get(type(config), None)


def freeze_other_parts(model: nn.Module) -> nn.Module:
    """Freezes what a text is computed without; returns the model."""
    for name, parameter in model.named_parameters():
        if not is_of_text(name):
            parameter.requires_grad_(False)
    return model


def text_config(model: nn.Module) -> Any:
    """Returns the configuration of the part of `model` that computes text."""
    return model.config.get_text_config(decoder=True)


def keep_other_parts(base: Path, directory: Path) -> None:
    """Puts the tensors of other parts of the checkpoint `base` into `directory`, which has trained weights, bit for bit.

    The trainer may have read them in another precision, or not at all: transformers leaves out layers that predict more.
    Raises `OSError` and `ValueError`.
    """
    wanted = {
        name: (path, entry)
        for path in (weight_files(base) if any(base.glob("*.safetensors")) else ())
        for name, entry in read_header(path).items()
        if not is_of_text(name)
    }
    if not wanted:
        return
    there: dict[str, Path] = {}
    for path in weight_files(directory):
        header = read_header(path)
        there |= dict.fromkeys(header, path)
        if all(header[name] == entry for name, (_, entry) in wanted.items() if name in header):
            continue
        _add(wanted, [name for name in wanted if name in header], path)
    if missing := sorted(wanted.keys() - there.keys()):
        last = max(there.values())
        _add(wanted, missing, last)
        index = directory / INDEX
        if index.is_file():
            content = json.loads(index.read_bytes())
            content["weight_map"] |= dict.fromkeys(missing, last.name)
            index.write_text(json.dumps(content, indent=2) + "\n")


def _add(wanted: dict[str, tuple[Path, Any]], names: list[str], target: Path) -> None:
    tensors = load_file(target)
    for name in names:
        with safe_open(wanted[name][0], "pt") as file:
            tensors[name] = file.get_tensor(name)
    save_file(tensors, target, {"format": "pt"})
