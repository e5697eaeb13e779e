"""LoRA: a low-rank adapter beside a frozen linear layer, and its export in PEFT's format, which vLLM loads.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021. Our own small layer and not PEFT's, because
many runs will share one base layer with an adapter each, which PEFT's layers were not made for. Adapters are float32
whatever the precision of the base. Experts of a mixture are one fused parameter, not linear layers: they stay frozen.
"""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.config import LoraConfig

logger = logging.getLogger(__name__)


class LoraLinear(nn.Module):
    """`base(x) + (alpha / rank) * B A x`, with `A` `[rank, in]` random and `B` `[out, rank]` zero at the start."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        device = base.weight.device
        bound = 1 / math.sqrt(base.in_features)
        initial = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_A = nn.Parameter(initial.to(device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`, in the precision of `hidden`."""
        low_rank = functional.linear(functional.linear(hidden.float(), self.lora_A), self.lora_B)
        return self.base(hidden) + (self.scale * low_rank).to(hidden.dtype)


def attach_adapter(model: nn.Module, config: LoraConfig, seed: int) -> None:
    """Freezes the model and puts an adapter on every linear layer whose name's last part is in `config.target_modules`.

    Raises:
        ValueError: no layer has any of these names.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    chosen = {name: linear for name, linear in linears.items() if _last(name) in config.target_modules}
    if not chosen:
        raise ValueError(
            f"training.lora.target_modules = {config.target_modules}: this model has no such linear layer; "
            f"it has {sorted({_last(name) for name in linears})}"
        )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, linear in chosen.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LoraLinear(linear, config.rank, config.alpha, generator))
    if missing := set(config.target_modules) - {_last(name) for name in chosen}:
        logger.warning("LoRA: no linear layer is named %s; expert weights, being fused, stay frozen", sorted(missing))


def export_adapter(model: nn.Module, config: LoraConfig, base_model: str, directory: Path) -> None:
    """Writes `adapter_model.safetensors` and `adapter_config.json`, as PEFT names them, into `directory`."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = layer.lora_A.detach().cpu().contiguous()
        tensors[f"base_model.model.{name}.lora_B.weight"] = layer.lora_B.detach().cpu().contiguous()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({_last(name) for name in layers}),
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(description, indent=2) + "\n")


def _last(name: str) -> str:
    return name.rpartition(".")[2]
