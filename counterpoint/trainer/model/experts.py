"""Expert parallelism: the ranks of a group own each an equal part of a mixture's experts, and tokens travel to their owners.

The fused weights of a layer's experts are divided by expert while the model has no memory yet, so transformers reads this rank's
experts alone; all else of the model is whole on each rank, or divided by `counterpoint/trainer/model/sharding.py`. A group is of
neighbouring ranks. An owner computes the tokens of the whole group for its experts (`counterpoint/trainer/model/exchange.py`), so
it has their gradient by the group's rows; ranks of other groups that own the same experts (its peers) have the rest.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from counterpoint.trainer.model.adapters.factor_stacks import ALIGNMENT
from counterpoint.trainer.model.exchange import Exchange, ExpertGroup, exchange_of, own_weight

WEIGHTS = ("gate_up_proj", "down_proj")
"""The fused weights of a layer's experts, `[E, O, I]` each."""


def are_known_experts(module: nn.Module) -> bool:
    """Returns whether `module` is the experts of a layer as in Qwen3-MoE, Mixtral and most others.

    They have weights `[E, out, in]`, gate over up, no bias, and sizes that grouped products take.
    """
    return (
        hasattr(module, "_apply_gate")  # transformers' `use_experts_implementation` has been applied to its class
        and bool(module.has_gate and module.is_concatenated)
        and not (module.is_transposed or module.has_bias or module._is_expert_parallel)
        and all(size % ALIGNMENT == 0 for name in WEIGHTS for size in getattr(module, name).shape[1:])
    )


def divide_experts(model: nn.Module, group: ExpertGroup) -> set[nn.Parameter]:
    """Leaves to each layer of a model without memory this rank's part of its experts; returns the weights that are divided.

    Raises `ValueError` for a model whose experts cannot be divided.
    """
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "_apply_gate")}
    if not layers:
        raise ValueError(
            f"expert_parallel = {group.size}: {type(model).__name__} has no experts that can be divided; "
            "expected a mixture of experts as Qwen3-MoE, or expert_parallel = 1"
        )
    divided: set[nn.Parameter] = set()
    for name, module in layers.items():
        if not are_known_experts(module):
            raise ValueError(
                f"expert_parallel = {group.size}: the experts {name} of {type(model).__name__} cannot be divided; expected gated "
                f"experts without bias, as in Qwen3-MoE, with sizes in multiples of {ALIGNMENT}; use expert_parallel = 1"
            )
        experts = len(module.gate_up_proj)
        if experts % group.size:
            raise ValueError(f"expert_parallel = {group.size} does not divide the {experts} experts of {name}")
        for weight in WEIGHTS:
            divided.add(_divide(module, weight, group))
        exchange: Any = Exchange(group, experts)
        module.exchange = exchange
        module.forward = partial(_forward, module, exchange)
    return divided


def _divide(module: nn.Module, name: str, group: ExpertGroup) -> nn.Parameter:
    whole = module.get_parameter(name)
    own = whole.detach()[: len(whole) // group.size]
    placed = DTensor.from_local(own, group.mesh["experts"], [Shard(0)], run_check=False)
    divided = nn.Parameter(placed, requires_grad=whole.requires_grad)
    setattr(module, name, divided)
    return divided


def _forward(experts: nn.Module, exchange: Exchange, hidden_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
    return exchange.over_ranks(partial(compute_experts, experts), hidden_TH, expert_TK, weight_TK)


def compute_experts(experts: nn.Module, rows_MH: Tensor, counts_E: Tensor) -> Tensor:
    """Computes rows, sorted by expert, by this rank's experts, `[M, H]` to `[M, H]`; `counts_E`: int64, of each expert."""
    ends = counts_E.cumsum(0, dtype=torch.int32)
    gate_up_MI = functional.grouped_mm(rows_MH, own_weight(experts.gate_up_proj).transpose(-2, -1), offs=ends)
    return functional.grouped_mm(
        experts._apply_gate(gate_up_MI), own_weight(experts.down_proj).transpose(-2, -1), offs=ends
    )


def expert_weights(model: nn.Module) -> list[str]:
    """Returns the names of the weights that `divide_experts` has divided."""
    return [f"{name}.{weight}" for name, module in model.named_modules() if exchange_of(module) for weight in WEIGHTS]


def form_groups(size: int, device: torch.device, timeout: Any) -> ExpertGroup | None:
    """Makes the groups of `size` neighbouring ranks that divide the experts, and their peers; every rank calls it.

    Returns this rank's; None for `size` 1.
    """
    if size == 1:
        return None
    ranks = torch.arange(dist.get_world_size()).view(-1, size)
    groups = [dist.new_group(row, timeout=timeout) for row in ranks.tolist()]
    peers = [dist.new_group(column, timeout=timeout) for column in ranks.T.tolist()]
    place, index = divmod(dist.get_rank(), size)
    mesh = DeviceMesh.from_group(
        [peers[index], groups[place]], device.type, mesh=ranks, mesh_dim_names=("peers", "experts")
    )
    return ExpertGroup(groups[place], peers[index], index, size, len(ranks), mesh)
