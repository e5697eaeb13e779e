"""The weight-transfer backend `counterpoint`: loads a published checkpoint directory into the running model.

It runs in each vLLM worker, on the checkpoint as the trainer wrote it: in place where no layer needs more
(`engine/in_place.py`), else through vLLM's layerwise reload (https://docs.vllm.ai/en/latest/training/layerwise/). Everything
happens in `receive_weights`, after validation: a directory that is refused leaves the model as it was. The pool checks by a probe
that the weights are right.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from counterpoint.inference import delta
from counterpoint.inference.checkpoint import (
    TensorEntry,
    is_delta,
    read_manifest,
    require_same_model,
    weight_files,
)
from counterpoint.inference.plugin.cpu.embeddings import keep_embeddings_once
from counterpoint.inference.plugin.engine.in_place import load_in_place, loads_in_place


@dataclass
class DirectoryInitInfo(WeightTransferInitInfo):
    """Empty: there is nothing to agree on."""


@dataclass
class DirectoryUpdateInfo(WeightTransferUpdateInfo):
    """The directory of the checkpoint."""

    directory: str


class DirectoryWeightTransferEngine(WeightTransferEngine[DirectoryInitInfo, DirectoryUpdateInfo]):
    """Reads weights from a directory that every worker can read."""

    init_info_cls = DirectoryInitInfo
    update_info_cls = DirectoryUpdateInfo
    _expected: dict[str, TensorEntry] | None = None
    """The tensors of the model that the server was started with, once they have been read."""

    def init_transfer_engine(self, init_info: DirectoryInitInfo) -> None:
        """Does nothing: there is no rendezvous."""

    def start_weight_update(self) -> None:
        """Does nothing: `receive_weights` takes the model apart, once the directory is known to be good."""

    def receive_weights(self, update_info: DirectoryUpdateInfo) -> None:
        """Loads the checkpoint.

        Raises `ValueError`, before the model is touched, unless it is one of the model being served.
        """
        directory = Path(update_info.directory)
        tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
        if self._expected is None:
            self._expected = read_manifest(Path(self.model_config.model))
        require_same_model(self._expected, read_manifest(directory), tied)
        if loads_in_place(self.model):
            load_in_place(self.model, read_tensors(directory))
            return
        with _quiet_about_layers_without_weights(self.model):
            initialize_layerwise_reload(self.model)
            self.model.load_weights(read_tensors(directory))
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _repack_for_cpu(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Does what the base class does, but uses no accelerator where there is none."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Does nothing: `receive_weights` has finished already."""

    def shutdown(self) -> None:
        """Does nothing: nothing is held."""


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields name and tensor of all that a checkpoint holds, on the CPU, one at a time; of a delta, as it makes them."""
    changed = delta.read_delta(directory) if is_delta(directory) else {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118  (a safetensors handle is no mapping)
                tensor = file.get_tensor(name)
                yield name, delta.changed_tensor(tensor, changed[name], name) if name in changed else tensor


@contextmanager
def _quiet_about_layers_without_weights(model: torch.nn.Module) -> Iterator[None]:
    """Silences vLLM's warning "Failed to load weights" for layers without weights of their own.

    vLLM 0.32 logs it of every layer that a reload gave no weights: also of rotary embeddings, whose tables are computed, and
    of a tied `lm_head`, whose weights are the embedding's. For a layer with weights of its own the warning stays.
    """
    owned: set[int] = set()
    with_weights: set[str] = set()
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)} - owned
        owned |= own
        with_weights |= {type(layer).__name__} if own else set()

    def is_news(record: logging.LogRecord) -> bool:
        named = record.args[0] if isinstance(record.args, tuple) and record.args else None
        return "Failed to load weights" not in record.msg or named in with_weights

    logger = logging.getLogger(finalize_layerwise_reload.__module__)
    logger.addFilter(is_news)
    try:
        yield
    finally:
        logger.removeFilter(is_news)


def _repack_for_cpu(model: torch.nn.Module) -> None:
    """Repeats what vLLM's CPU build does at start and its reload leaves out (0.32)."""
    pack_experts(model)
    pack_head(model)
    keep_embeddings_once(model)


def pack_experts(model: torch.nn.Module) -> None:
    """Packs experts for the grouped GEMM."""
    for module in model.modules():
        if type(module).__name__ == "RoutedExperts":
            module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(module)


def pack_head(model: torch.nn.Module) -> None:
    """Packs a tied `lm_head`, which owns no weights and so is never reloaded, anew."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    head = getattr(model, "lm_head", None)
    head = getattr(head, "base_layer", head)
    if head is not None and hasattr(head, "cpu_linear"):
        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
