"""Exports a random adapter; compares one that PEFT has loaded with the same adapter in the trainer.

Users load what a run publishes with PEFT. It converts adapters of many mixtures, by names, so a file may load without an error
and be another function. `check_export` finds out for a model and the names of the layers with adapters.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.lora.multi_lora import adapter_spans, apply_lora_to_model, export_adapter
from counterpoint.trainer.lora.targets import adaptable, check_targets, prove_layers
from counterpoint.trainer.model.load import load_model, log_probabilities
from counterpoint.trainer.model.text_part import text_config

_CPU = torch.device("cpu")
_TOKENS = 12
_RANK, _ALPHA = 4, 8.0


@dataclass(frozen=True, slots=True)
class ExportCheck:
    """How far PEFT is from the trainer with one adapter, in nats, the largest of a few tokens."""

    difference: float
    effect: float
    """How much the adapter changes the bare model: without an effect, a small difference says nothing."""


def layer_names(directory: Path) -> list[str]:
    """Returns the names of the layers that can have an adapter in the model in `directory`, which the trainer can load."""
    model = load_model(directory, "float32", _CPU)
    prove_layers(model)
    return sorted({path.rpartition(".")[2] for path in adaptable(model)})


def check_export(directory: Path, targets: Sequence[str], dtype: str = "float32") -> ExportCheck:
    """Exports a random adapter on the `targets` of the model in `directory`, loads it with PEFT, and compares.

    Raises:
        ValueError: the trainer refuses the model or the targets, or PEFT refuses the file.
    """
    config = LoraConfig(rank=_RANK, alpha=_ALPHA, target_modules=list(targets))
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft's own imports
        from peft import PeftModel

        tokens_T, bare_P, ours_P = export_random(directory, config, Path(place), dtype)
        loaded = PeftModel.from_pretrained(load_model(directory, dtype, _CPU), place).eval()
        theirs_P = _values(loaded, tokens_T)
    return ExportCheck(float((theirs_P - ours_P).abs().max()), float((ours_P - bare_P).abs().max()))


def export_random(
    directory: Path, config: LoraConfig, place: Path, dtype: str = "float32", std: float = 0.1
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes an adapter of normal numbers for the model in `directory` into `place`, in PEFT's format.

    Returns some tokens `[12]`, and the log-probabilities `[11]` of all but the first, without the adapter and with it. Raises
    `ValueError` for a model or targets that the trainer refuses.
    """
    model = load_model(directory, dtype, _CPU)
    prove_layers(model)
    check_targets(model, config, config.rank)
    generator = torch.Generator().manual_seed(0)
    tokens_T = torch.randint(3, text_config(model).vocab_size, (_TOKENS,), generator=generator)
    bare_P = _values(model, tokens_T)
    layers = apply_lora_to_model(model, 1, config)
    for layer in layers.values():
        layer.admit(0, config.rank, config.alpha, generator)
        for parameter in layer.adapter_parameters(0).values():
            nn.init.normal_(parameter, std=std, generator=generator)
    export_adapter(layers, 0, config, str(directory), place)
    return tokens_T, bare_P, _values(model, tokens_T)


def _values(model: nn.Module, tokens_T: Tensor) -> Tensor:
    positions_T = torch.arange(len(tokens_T))
    with torch.no_grad(), adapter_spans(model, [(0, len(tokens_T))]):
        values_P, _ = log_probabilities(
            model, tokens_T, positions_T, [len(tokens_T)], positions_T[:-1], tokens_T[1:], 1.0
        )
    return values_P
