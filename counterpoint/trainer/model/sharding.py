"""Shards a model over all ranks by FSDP2: each rank stores a slice of every weight, and layers are whole only while they compute.

Transformers builds the model without memory, `fully_shard` divides each decoder layer and what is outside the layers by the first
dimension, and transformers then reads this rank's slices of the files (a fused expert weight from the files of its own experts).
No rank ever holds the whole model, and gradients are added over the ranks while they are computed. Adapters stay whole on each
rank: they are small, and a run's optimizer then works as it does without sharding. `counterpoint/trainer/model/passes.py` keeps
the ranks' forward passes together.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed import DistributedConfig

from counterpoint.inference.digest import is_of_text
from counterpoint.trainer.model.exchange import ExpertGroup
from counterpoint.trainer.model.experts import divide_experts
from counterpoint.trainer.model.text_part import class_of, read_config, text_config


def load_divided(
    directory: Path,
    dtype: torch.dtype,
    ranks: int,
    attention: str | None,
    *,
    sharded: bool,
    experts: ExpertGroup | None,
) -> nn.Module:
    """Loads this rank's part of the model in `directory`; every rank calls it.

    Args:
        directory: of the model.
        dtype: of its weights.
        ranks: of all of them.
        attention: what computes it; None: what transformers chooses.
        sharded: whether all weights are divided over all ranks.
        experts: the ranks that divide the experts; None: they are as the other weights.

    Raises what `from_pretrained` raises, and `ValueError` for a model whose layers or experts are not as expected.
    """
    config = read_config(directory)
    kind = class_of(config)
    members: dict[str, Any] = {"__module__": kind.__module__, "sharded": sharded, "experts": experts}
    divided: Any = type(kind.__name__, (_Divided, kind), members)
    model: nn.Module = divided.from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        attn_implementation=attention,
        local_files_only=True,
        # Gradients of a lower precision are added in float32.
        distributed_config=DistributedConfig(fsdp_size=ranks, fsdp_mixed_precision=dtype == torch.bfloat16),
    )
    del model.config.distributed_config  # it is not the model's, and would be written into its config.json
    padded: dict[int, Tensor] = {}
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are added, not averaged: the loss is divided by the tokens of all ranks.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            _tie_memory(module, padded)
    return model


def _tie_memory(module: FSDPModule, padded: dict[int, Tensor]) -> None:
    """Has FSDP take a tied weight from one memory under all its names; `padded`: by the weight, of modules before.

    It knows each name apart, since they are tied only once the files are read. Where ranks have unequal parts of the rows, it
    pads those of each name in a memory of its own, of which an update would reach one alone.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for each in group.fsdp_params:
            weight = getattr(each._module_info.module, each._module_info.param_name)
            each._sharded_param_data = padded.get(id(weight), each._sharded_param_data)
            each.reset_sharded_param()
            padded[id(weight)] = each._sharded_param_data


class _Divided:
    """A model that is divided before transformers reads its weights, whatever its own plan says."""

    sharded: bool
    experts: ExpertGroup | None

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> nn.Module:
        own = divide_experts(model, cls.experts) if cls.experts is not None else set()
        if cls.sharded:
            shard(model, mesh_manager.get_mesh("fsdp"), distributed_config.fsdp_mixed_precision, cls.experts, own)
        return cast(nn.Module, model)


def shard(model: Any, mesh: DeviceMesh, mixed: bool, group: ExpertGroup | None, experts: set[nn.Parameter]) -> None:
    """Divides a model layer by layer over `mesh`, with all other weights as one group.

    Of the weights of `experts`, which are divided over the ranks of `group` already, each rank's part is divided over its peers.
    `mixed`: weights are of a lower precision.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    depth = text_config(model).num_hidden_layers
    found = [name for name in layers if is_of_text(name) and not any(part.isdecimal() for part in name.split("."))]
    found = [name for name in found if len(model.get_submodule(name)) == depth]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} cannot be sharded: expected one list of {depth} decoder layers, found {found or layers}"
        )
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": experts}
    if group is not None and group.copies > 1:
        over_peers = ShardPlacementResult(Shard(0), FSDPMeshInfo(group.mesh["peers"], shard_mesh_dim=0))
        options = {"mesh": mesh, "shard_placement_fn": lambda weight: over_peers if weight in experts else None}
    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.get_submodule(found[0]):
        fully_shard(layer, reshard_after_forward=True, **options)
    fully_shard(model, **options)


def rest(model: nn.Module) -> None:
    """Frees whole weights that a sharded model has kept after its last forward pass; its parameters are then the slices."""
    if isinstance(model, FSDPModule):
        model.reset_iter_state()


def local_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns this rank's slices of the trainable weights, by name, in the memory of the model; their gradients arrive summed.

    They are plain parameters: an optimizer needs to know nothing of the other ranks. A weight that is whole here is itself. The
    model must have computed once, and be at rest.
    """
    found: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if not isinstance(parameter, DTensor):
                found[name] = parameter
                continue
            found[name] = nn.Parameter(parameter.to_local().detach())
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, found[name]))
    return found


def _move_gradient(local: nn.Parameter, parameter: Any) -> None:
    gradient = parameter.grad.to_local()
    parameter.grad = None
    local.grad = gradient if local.grad is None else local.grad.add_(gradient)
    for hook in (getattr(local, "_post_accumulate_grad_hooks", None) or {}).values():  # as autograd would
        hook(local)


def rows_of(model: nn.Module) -> dict[str, int]:
    """Returns the rows of each whole weight, by name. The model must be at rest."""
    return {name: len(parameter) for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)}


def whole_weights(model: nn.Module, keep: bool) -> dict[str, Tensor]:
    """Gathers the weights by name, one after the other, into the CPU's memory where `keep` is set; every rank calls it.

    Tied weights are one tensor. The model must be at rest.
    """
    known: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            known[id(tensor)] = whole.detach().to("cpu", copy=True) if keep else whole.new_empty(0)
        if keep:
            state[name] = known[id(tensor)]
    return state


def differentiate_inputs(model: nn.Module) -> None:
    """Gives the token embeddings of a frozen model a gradient, so that every backward pass goes through all layers.

    Otherwise which layers a rank gathers would depend on the adapters in its row, and the first layer would be compiled twice.
    """

    def require_gradient(_module: nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not embedded.requires_grad:
            embedded.requires_grad_()
        return embedded

    model.get_input_embeddings().register_forward_hook(require_gradient)
