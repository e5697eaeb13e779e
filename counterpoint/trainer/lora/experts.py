"""Adapters on the fused experts of a mixture: a low-rank product for each expert and slot.

Transformers keeps all experts of a layer in two parameters and computes them by grouped products over tokens sorted by
expert. The update enters between the two products, so it cannot be added to the module's output. Instead the layer computes both
products over tokens sorted by expert and then by span of the row, with the module's own weights and activation. gate_proj and
up_proj, one matrix in the model, share an A. Suffixes: `N` for the `T * K` pairs of token and expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from counterpoint.trainer.lora.peft_names import PROJECTIONS
from counterpoint.trainer.model.adapters.adapted_layer import MultiLora
from counterpoint.trainer.model.adapters.factor_stacks import stacked
from counterpoint.trainer.model.exchange import exchange_of, own_weight
from counterpoint.trainer.model.experts import compute_experts
from counterpoint.trainer.model.without_waiting import counts_of

GATE_UP, DOWN = "gate_up_proj.", "down_proj."


class MultiLoraExperts(MultiLora):
    """Experts that add, to both of their products, the low-rank product of the token's slot."""

    def __init__(self, base_layer: nn.Module, rank: int, n_adapters: int) -> None:
        """Wraps `base_layer`, for which `are_known_experts` is true, with `n_adapters` slots for ranks up to `rank`."""
        super().__init__(base_layer, {GATE_UP: "gate_up_proj", DOWN: "down_proj"}, rank, n_adapters)

    def forward(self, hidden_TH: Tensor, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        """Maps `[T, H]` to `[T, H]`: the weighted sum of each token's experts; tokens in the order of the row."""
        if (exchange := exchange_of(self.base)) is not None:
            # Tokens of other ranks arrive as well, so a token's kind is its slot, not its span.
            kind_T = None if self.spans is None else self.spans.slot_T + 1
            return exchange.over_ranks(self._of_all_slots, hidden_TH, expert_TK, weight_TK, kind_T, self.n_adapters + 1)
        if self.spans is None or not any(slot in self.adapters for slot in self.spans.slots):
            return self.base(hidden_TH, expert_TK, weight_TK)
        spans, top_k = len(self.spans.slots), expert_TK.shape[-1]
        group_N = (expert_TK * spans + self.spans.span_T[:, None]).flatten()
        order_N = group_N.argsort(stable=True)
        counts = counts_of(group_N, len(self.base.gate_up_proj) * spans)
        ends = counts.cumsum(0, dtype=torch.int32)
        gate_up_NI = self._product(GATE_UP, hidden_TH[order_N // top_k], ends, self.spans.slots)
        down_NH = self._product(DOWN, self.base._apply_gate(gate_up_NI), ends, self.spans.slots)
        weighted_NH = down_NH * weight_TK.flatten()[order_N, None]
        # Restored to the row's order and summed in a fixed order: adding by index is not deterministic on a GPU.
        back_N = torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))
        return weighted_NH[back_N].view(*expert_TK.shape, -1).sum(1).to(hidden_TH.dtype)

    def _of_all_slots(self, rows_MH: Tensor, counts_G: Tensor) -> Tensor:
        """Computes rows of this rank's experts, sorted by expert and then by kind: no slot, and each slot."""
        counts_EK = counts_G.view(-1, self.n_adapters + 1)
        present = counts_EK.sum(0).nonzero()[:, 0].tolist()
        slots = [kind - 1 for kind in present]
        if not any(slot in self.adapters for slot in slots):
            return compute_experts(self.base, rows_MH, counts_EK.sum(1))
        ends = counts_EK[:, present].flatten().cumsum(0, dtype=torch.int32)
        gate_up_MI = self._product(GATE_UP, rows_MH, ends, slots)
        return self._product(DOWN, self.base._apply_gate(gate_up_MI), ends, slots)

    def _product(self, prefix: str, rows_NI: Tensor, ends: Tensor, slots: Sequence[int]) -> Tensor:
        """Multiplies each row by its expert's weight and its low-rank product; `ends`: int32, of each expert's slots."""
        exchange, weight = exchange_of(self.base), own_weight(self.base_weight(prefix))
        factors = self.row_factors(prefix, slots, None if exchange is None else exchange.own)
        lora_A, lora_B = (factor.flatten(0, 1).transpose(-2, -1) for factor in stacked(factors, rows_NI))
        output_NO = functional.grouped_mm(rows_NI, weight.transpose(-2, -1), offs=ends[len(slots) - 1 :: len(slots)])
        shrunk_NR = functional.grouped_mm(rows_NI, lora_A, offs=ends)
        return output_NO + functional.grouped_mm(shrunk_NR, lora_B, offs=ends)

    def adapter_state(self, slot: int) -> dict[str, Tensor]:
        """Returns an adapter for `gate_proj`, `up_proj` and `down_proj` of each expert, whatever the checkpoint calls these."""
        state: dict[str, Tensor] = {}
        for prefix, product in self.adapters.get(slot, {}).items():
            names = PROJECTIONS[:2] if prefix == GATE_UP else PROJECTIONS[2:]
            for expert, (lora_A, lora_B) in enumerate(
                zip(product.lora_A.detach(), product.lora_B.detach(), strict=True)
            ):
                for name, part in zip(names, lora_B.chunk(len(names)), strict=True):
                    state |= {f"{expert}.{name}.lora_A.weight": lora_A, f"{expert}.{name}.lora_B.weight": part}
        return state
