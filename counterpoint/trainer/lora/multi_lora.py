"""Adapters (LoRA) of many runs over one frozen model, by slot, beside its linear layers and its experts.

A layer holds an adapter for each taken slot (`counterpoint/trainer/model/adapters/adapted_layer.py`), with its own parameters and
rank, so memory grows with the adapters, and an optimizer owns those of its run alone. `adapter_spans` sets which tokens of a
forward pass use which slot; outside it the model is the bare base. The base does not learn, and the tokens of two runs do not
mix, so values that are not finite stay in their run. Exports are in PEFT's format, which vLLM loads.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from counterpoint.inference.digest import DTYPES, Digest, digest_of, layer_of, scaled_adapter
from counterpoint.run.adapter_description import describe
from counterpoint.run.trained import LoraConfig
from counterpoint.trainer.lora.experts import MultiLoraExperts
from counterpoint.trainer.lora.peft_names import peft_names
from counterpoint.trainer.lora.targets import adaptable, is_target
from counterpoint.trainer.model.adapters.adapted_layer import AdapterSpans, MultiLora, Registry, add_low_rank, applied
from counterpoint.trainer.model.context import stretch_of


class MultiLoRALinear(MultiLora):
    """A linear layer: `base(x) + (alpha / rank) * B A x` with the `A` `[rank, in]` and `B` `[out, rank]` of each token's slot."""

    def __init__(self, base_layer: nn.Linear, rank: int, n_adapters: int) -> None:
        """Wraps `base_layer`, with `n_adapters` slots for adapters of ranks up to `rank`."""
        super().__init__(base_layer, {"": "weight"}, rank, n_adapters)

    @property
    def weight(self) -> Tensor:
        """The base's weight, `[out, in]`: some models look at it, such as at its precision."""
        return self.base_weight("")

    @property
    def bias(self) -> Tensor | None:
        """The base's bias, `[out]`."""
        bias: Tensor | None = self.base.bias
        return bias

    @property
    def in_features(self) -> int:
        """The width of the base's input."""
        return int(self.base.in_features)

    @property
    def out_features(self) -> int:
        """The width of the base's output."""
        return int(self.base.out_features)

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps `[..., in]` to `[..., out]`, in the precision of `hidden`; tokens in the order of the row."""
        output = self.base(hidden)
        return output if self.spans is None else add_low_rank(output, hidden, self, "")

    def adapter_state(self, slot: int) -> dict[str, Tensor]:
        """Returns `lora_A.weight` `[rank, in]` and `lora_B.weight` `[out, rank]`, which share the parameters' memory."""
        return {f"{name}.weight": parameter.detach() for name, parameter in self.adapter_parameters(slot).items()}


def apply_lora_to_model(
    model: nn.Module, n_adapters: int, config: LoraConfig, max_rank: int | None = None, manager: Registry | None = None
) -> dict[str, MultiLora]:
    """Freezes the model and wraps each layer on which a run with this configuration has an adapter, unless it is wrapped already.

    Args:
        model: of which layers are replaced.
        n_adapters: slots of each layer.
        config: of the run.
        max_rank: the highest rank that any run may have; that of `config` if not given.
        manager: registers all wrapped layers, in the model's order. None: the caller registers them.

    Returns:
        All wrapped layers by module path, in the model's order. Without an adapter they compute what the bare layers compute.
    """
    known = adaptable(model)
    new = {path: each for path, each in known.items() if is_target(path, config) and not isinstance(each, MultiLora)}
    linear = [path for path, module in new.items() if isinstance(module, nn.Linear)]
    experts = {path: len(module.gate_up_proj) for path, module in new.items() if path not in linear}
    for path, names in peft_names(model, linear, experts, known).items():
        parent, _, child = path.rpartition(".")
        kind = MultiLoraExperts if path in experts else MultiLoRALinear
        layer = kind(new[path], config.rank if max_rank is None else max_rank, n_adapters)
        layer.peft_names = names
        setattr(model.get_submodule(parent), child, layer)
    model.requires_grad_(False)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MultiLora)}
    if manager is not None:
        for name, layer in layers.items():
            layer.register_with_runs(manager, name)
    return layers


@contextmanager
def adapter_spans(model: nn.Module, spans: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Applies to each token, in forward passes inside, the adapter of its slot, if that has one.

    Args:
        model: wrapped by `apply_lora_to_model`; a bare model computes as without this.
        spans: `(slot, tokens)` in the order of the packed row, adding up to its tokens.
    """
    layers = [module for module in model.modules() if isinstance(module, MultiLora)]
    stretch = stretch_of(model, sum(tokens for _, tokens in spans))
    own = spans if stretch is None else stretch.spans(spans)
    known = AdapterSpans.of(own, next(model.parameters()).device) if layers else None
    with applied(layers, known):
        yield


def peft_state(layers: Mapping[str, MultiLora], slot: int) -> dict[str, Tensor]:
    """Returns the weights of a slot on all `layers` (by module path) as files name them; they may share memory."""
    state: dict[str, Tensor] = {}
    for path, layer in layers.items():
        for name, tensor in layer.adapter_state(slot).items():
            part, _, factor = name.rpartition("lora_")
            part = part.removesuffix(".")
            stored = layer.peft_names.stored.get(part, f"{path}.{part}" if part else path)
            state[f"base_model.model.{stored}.lora_{factor}"] = tensor
    return state


def export_adapter(
    layers: Mapping[str, MultiLora], slot: int, config: LoraConfig, base_model: str, directory: Path
) -> dict[str, Tensor]:
    """Writes the adapter of a slot of `layers` (by module path) in PEFT's format; returns the written tensors, on the CPU.

    The files in `directory` are `adapter_model.safetensors` and `adapter_config.json`. Raises `OSError`.
    """
    # Each with its own memory: safetensors refuses two names for one.
    tensors = {name: tensor.cpu().clone().contiguous() for name, tensor in peft_state(layers, slot).items()}
    # Not save_file, whose errors hide the errno.
    (directory / "adapter_model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    names = [layer.peft_names for layer in layers.values() if slot in layer.adapters]
    description = describe(
        config,
        base_model,
        (module for each in names for module in each.target_modules),
        (parameter for each in names for parameter in each.target_parameters),
    )
    (directory / "adapter_config.json").write_text(json.dumps(description, indent=2) + "\n")
    return tensors


def digest_adapter(
    tensors: Mapping[str, Tensor], scale: float, precisions: Collection[str] = DTYPES.keys()
) -> dict[str, Digest]:
    """Returns the digest of an adapter as an engine holds it, multiplied by `scale`, by the precision of the engine."""
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        factor = "lora_B" if ".lora_B." in name else "lora_A"
        parts.setdefault(f"{layer_of(name)}.{factor}.weight", []).append(tensor.detach().reshape(-1))
    # Rounding and scaling are of each element, and a digest is a sum: a layer's many small matrices are taken together.
    joined = {name: torch.cat(each) for name, each in parts.items()}
    return {name: digest_of(scaled_adapter(joined, scale, DTYPES[name]), DTYPES[name]) for name in precisions}
