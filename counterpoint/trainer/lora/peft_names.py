"""How the layers of an adapter are called in its files, so that PEFT and vLLM find them.

Weights are named as in the model's own checkpoint. Transformers renames layers when it reads some checkpoints, and fuses a
mixture's experts; vLLM and PEFT read adapters by the checkpoint's names. So the conversion is reverted for adapters as
`save_pretrained` does it for weights: numbers take the place of weights, and where a number is found is the name of its layer.

The description names modules of the model in transformers. PEFT takes some names, in a mixture, for the experts that transformers
has fused, also where a dense layer or shared experts have them; there it gets the weights themselves as `target_parameters`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.model.adapters.adapted_layer import PeftNames
from counterpoint.trainer.model.text_part import has_other_parts

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The weights of one expert. In transformers the first is above the second, in one weight."""

_TAKEN_FOR_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""The last parts of names that PEFT 0.21 takes for those of a mixture's experts, which transformers fuses."""


def peft_names(
    model: nn.Module, linear: Collection[str], experts: Mapping[str, int], known: Collection[str]
) -> dict[str, PeftNames]:
    """Returns the names of layers of `model` by their module paths.

    Args:
        model: transformers', with layers wrapped or not.
        linear: paths of linear layers.
        experts: by the path of a layer's experts, how many there are; each has `expert_names`.
        known: the paths of all layers of the model that can have adapters.
    """
    # Of a vision-language model transformers renames the text part as a whole, and PEFT and vLLM call it as transformers does.
    linear_weights = {f"{path}.weight": torch.full((1, 1), float(number)) for number, path in enumerate(linear)}
    files = {} if has_other_parts(model.config) else _reverted(model, linear_weights)
    # Not `_apply_gate` alone, which LongCat's experts lack.
    is_mixture = any(hasattr(module, "_apply_gate") or _has_fused(module) for module in model.modules())
    without = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in known}
    names: dict[str, PeftNames] = {}
    for number, path in enumerate(linear):
        last = path.rpartition(".")[2]
        # A layer that the checkpoint has together with others, or in parts, keeps its path.
        stored = {"": files.get(float(number), path)}
        if is_mixture and last in _TAKEN_FOR_EXPERTS:
            names[path] = PeftNames(stored, (), (f"{path}.weight",))
        else:
            names[path] = PeftNames(stored, (path if last in without else last,), ())
    for path, count in experts.items():
        found = expert_names(model, path, count)
        assert found is not None, f"{path} has no names in the checkpoint"
        stored = {
            f"{expert}.{name}": each
            for expert, three in enumerate(found)
            for name, each in zip(PROJECTIONS, three, strict=True)
        }
        names[path] = PeftNames(stored, (), (f"{path}.gate_up_proj", f"{path}.down_proj"))
    return names


def _has_fused(module: nn.Module) -> bool:
    return any(name == "gate_up_proj" and weight.ndim == 3 for name, weight in module.named_parameters(recurse=False))


def expert_names(model: nn.Module, path: str, experts: int) -> list[tuple[str, str, str]] | None:
    """Returns the names of each expert's gate, up and down projection in the checkpoint; None if it has no such weights.

    `path`: of the module of `model` that has the experts.
    """
    gate_up = torch.arange(2.0 * experts).view(experts, 2, 1)
    down = torch.arange(2.0 * experts, 3.0 * experts).view(experts, 1, 1)
    found = _reverted(model, {f"{path}.gate_up_proj": gate_up, f"{path}.down_proj": down})
    if len(found) < 3 * experts:
        return None
    return [(found[2.0 * each], found[2.0 * each + 1], found[2.0 * experts + each]) for each in range(experts)]


def _reverted(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[float, str]:
    """Returns the modules of the checkpoint that have one number of `weights`, by that; none if these cannot be reverted."""
    try:
        reverted: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    except Exception as error:  # operations of any model's conversion, which expect real sizes
        if is_fatal(error):
            raise
        return {}
    return {float(weight): name.removesuffix(".weight") for name, weight in reverted.items() if weight.numel() == 1}
