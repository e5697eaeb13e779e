"""Router replay (R3): routes each token in training to the experts that inference chose for it.

A mixture's gate takes a top-k. Where two experts are nearly equal, the rounding of another engine gives another choice, and the
trainer would differentiate another function than the sampled one. Replaying the recorded choice prevents that.
Source: Ma et al., "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", 2025. Only the choice is
replayed: the weights come from the trainer's own softmax at the recorded experts, so the gate keeps its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.inference.model_facts import EXPERT_COUNTS
from counterpoint.trainer.model.context import stretch_of
from counterpoint.trainer.model.text_part import text_config

_SOFTMAX_GATES = {
    "Qwen3MoeTopKRouter": None,
    "Qwen2MoeTopKRouter": None,
    "OlmoeTopKRouter": None,
    "MixtralTopKRouter": True,
}
"""Gates of transformers that take the top k of a softmax, and whether they renormalise (None: as `norm_topk_prob` is)."""


class RouterReplay:
    """Forward hooks on the gates of one model. Outside `replaying` they change nothing."""

    def __init__(self, model: nn.Module) -> None:
        """Finds the gates of `model`; a dense model has none, and this object then does nothing.

        Raises:
            ValueError: the model has gates whose weights cannot be recomputed here, or experts without a known gate.
        """
        gates = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith("Router")]
        for name, gate in gates:
            if type(gate).__name__ not in _SOFTMAX_GATES:
                raise ValueError(
                    f"router replay supports the gates {sorted(_SOFTMAX_GATES)}, but {name} is a {type(gate).__name__}; "
                    "set router_replay = false to train without it"
                )
        experts = max(int(getattr(text_config(model), name, None) or 0) for name in EXPERT_COUNTS)
        if experts and not gates:
            raise ValueError(
                f"{type(model).__name__} has {experts} experts, but no gate whose choice can be replayed; "
                "set router_replay = false to train without it"
            )
        self._model = model
        self.experts = int(gates[0][1].num_experts) if gates else 0
        self.top_k = int(gates[0][1].top_k) if gates else 0
        self.layers = int(text_config(model).num_hidden_layers) if gates else 0
        """Layers of a record: all hidden layers of the model, dense ones included, as vLLM numbers them."""
        self.record: tuple[Tensor, Tensor] | None = None
        """The arguments of `replaying` for the current row."""
        self._probabilities: dict[int, Tensor] | None = None
        for name, gate in gates:
            gate.register_forward_hook(partial(self._after_gate, _layer_index(name)))

    @contextmanager
    def replaying(self, routed_experts_TLK: Tensor, has_record_T: Tensor) -> Iterator[None]:
        """Routes as recorded in forward passes inside.

        Args:
            routed_experts_TLK: integers `[T, layers, top_k]`; rows without a record may hold anything below `experts`.
            has_record_T: bool `[T]`; where False, the model's own choice is used.
        """
        if (stretch := stretch_of(self._model, len(has_record_T))) is not None:
            routed_experts_TLK, has_record_T = stretch.take(routed_experts_TLK), stretch.take(has_record_T)
        with self.with_record((routed_experts_TLK, has_record_T)):
            yield

    @contextmanager
    def with_record(self, record: tuple[Tensor, Tensor] | None) -> Iterator[None]:
        """Has this as the `record` of the current row; None routes freely."""
        before, self.record = self.record, record
        try:
            yield
        finally:
            self.record = before

    @contextmanager
    def observing(self) -> Iterator[dict[int, Tensor]]:
        """Collects each gate's softmax by layer, float32 `[T, experts]` without gradient, of the last forward pass inside."""
        self._probabilities = {}
        try:
            yield self._probabilities
        finally:
            self._probabilities = None

    def _after_gate(
        self, layer: int, gate: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """Replaces the output of the gate of `layer` (logits, weights, indices)."""
        logits_TE, weights_TK, indices_TK = output
        if self._probabilities is not None:
            self._probabilities[layer] = torch.softmax(logits_TE.detach(), dim=-1, dtype=torch.float32)
        if self.record is None:
            return output
        routed_experts_TLK, has_record_T = self.record
        recorded_TK = routed_experts_TLK[:, layer].to(indices_TK.dtype)
        chosen_TK = torch.where(has_record_T[:, None], recorded_TK, indices_TK)
        replayed_TK = torch.softmax(logits_TE, dim=-1, dtype=torch.float32).gather(-1, chosen_TK)
        renormalise = _SOFTMAX_GATES[type(gate).__name__]
        if gate.norm_topk_prob if renormalise is None else renormalise:
            replayed_TK = replayed_TK / replayed_TK.sum(dim=-1, keepdim=True)
        return logits_TE, replayed_TK.to(weights_TK.dtype), chosen_TK


def _layer_index(name: str) -> int:
    """Returns the number in a module path like `model.layers.3.mlp.gate`."""
    return next(int(part) for part in name.split(".") if part.isdigit())
