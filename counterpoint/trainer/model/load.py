"""Loads the causal language model that is trained, and calls its forward pass.

All code that runs the model (training, the probe, tests) calls `log_probabilities`, or `token_outputs` behind it, so packing,
temperature and precision are the same everywhere. The model is always in evaluation mode: with dropout the trainer would compute
another function than inference.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from counterpoint.trainer.faults import is_out_of_memory
from counterpoint.trainer.model import attention
from counterpoint.trainer.model.exchange import ExpertGroup
from counterpoint.trainer.model.head import token_outputs
from counterpoint.trainer.model.sharding import load_divided
from counterpoint.trainer.model.shared_prompts import Families
from counterpoint.trainer.model.text_part import auto_class, class_of, freeze_other_parts, read_config

_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""The files that say which weights are in which file."""

_MAX_INDEX_BYTES = 2**26
"""The size of such a file; that of a model with 100,000 weights has some 10 MB."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def choose_device(name: str) -> torch.device:
    """Returns the device for `auto`, `cpu` or `cuda`; with CUDA and several ranks, that of the local rank.

    Raises:
        ValueError: `name` is `cuda` and there is none.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise ValueError('device = "cuda", but torch sees no CUDA device here; use device = "cpu" or "auto"')
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the precision for `auto`, `float32` or `bfloat16`; `auto` suits the attention kernels of `device`."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return _DTYPES[name]


def load_model(
    directory: str | Path, dtype: str, device: torch.device, shards: int = 1, experts: ExpertGroup | None = None
) -> nn.Module:
    """Loads the model in `directory`, in evaluation mode, with attention within each sample where it can be exchanged.

    With several `shards`, one for each rank, this rank loads its own (`counterpoint/trainer/model/sharding.py`), and its own
    experts where the ranks of `experts` divide them (`counterpoint/trainer/model/experts.py`); every rank calls it.

    Raises:
        ValueError: there is no such model, or it cannot be read.
        MemoryError, RuntimeError: it does not fit into memory.
    """
    transformers_logging.disable_progress_bar()  # otherwise the log has a bar for every broadcast
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise ValueError(f"model = {str(directory)!r}: there is no config.json in that directory")
    try:
        _check_files(path)
        if shards > 1 or experts is not None:
            if device.type == "cpu" and torch.cuda.is_available():
                raise ValueError('it is divided over GPUs where there are any; expected device = "auto" or "cuda"')
            precision, ranks = choose_dtype(dtype, device), dist.get_world_size()
            divided = load_divided(path, precision, ranks, _attention_of(path), sharded=shards > 1, experts=experts)
            return freeze_other_parts(divided).eval()
        model: nn.Module = auto_class(read_config(path)).from_pretrained(
            path,
            dtype=choose_dtype(dtype, device),
            attn_implementation=_attention_of(path),
            local_files_only=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        said = "its code knows no other attention than transformers' own" if error.args == (attention.NAME,) else error
        raise ValueError(f"model = {str(directory)!r} cannot be loaded: {said}") from error
    return freeze_other_parts(model).to(device).eval()


def _attention_of(directory: Path) -> str | None:
    """Returns ours, or None, transformers' choice, for a model whose attention cannot be exchanged: it would lack its mask."""
    kind = class_of(read_config(directory))
    return attention.NAME if kind is None or kind._can_set_attn_implementation() else None


def _check_files(directory: Path) -> None:
    """Raises `ValueError` if the model has something in place of a file: reading a FIFO, which a run may name, would not end."""
    for path in directory.iterdir():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path.name} is neither a file nor a directory")
    for index in (directory / name for name in _INDICES if (directory / name).is_file()):
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ValueError(f"{index.name} has more than {_MAX_INDEX_BYTES} bytes")
        content = json.loads(index.read_bytes())
        if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
            raise ValueError(f"{index.name} has no weight_map; expected an object with the file of each weight")
        for shard in content["weight_map"].values():
            if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
                raise ValueError(f"{index.name} names {shard!r}; expected files of the same directory")


def log_probabilities(
    model: nn.Module,
    token_ids_T: Tensor,
    position_ids_T: Tensor,
    sample_lengths: Sequence[int],
    predicting_P: Tensor,
    targets_P: Tensor,
    temperature: Tensor | float,
    entropy_gradient: bool = False,
    families: Families | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes log-probabilities of chosen tokens of a packed row, and the entropies of their distributions.

    Args:
        model: from `load_model`.
        token_ids_T: int64 `[T]`, samples end to end.
        position_ids_T: int64 `[T]`, restarting at 0 with each sample.
        sample_lengths: tokens of each sample; their sum is T, without `families`.
        predicting_P: int64 `[P]`, the positions whose next token is given; logits are computed for these only, in chunks.
        targets_P: int64 `[P]`, the next tokens.
        temperature: divides the logits; one for all, or float32 `[P]`.
        entropy_gradient: whether the entropies have a gradient.
        families: the samples whose prompt is in the row once; only of a model that `shares_prompts`.

    Returns:
        float32 `[P]` natural log-probabilities, with gradient, and float32 `[P]` entropies in nats.
    """
    outputs = token_outputs(
        model,
        token_ids_T,
        position_ids_T,
        list(sample_lengths),
        predicting_P,
        targets_P,
        temperature,
        entropy_gradient=entropy_gradient,
        families=families,
    )
    return outputs.log_probabilities_P, outputs.entropies_P


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that require a gradient, by name; a tied parameter appears once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
