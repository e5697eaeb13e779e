"""Computes the adapters of a batch on a CPU: one product for all tokens of an adapter.

vLLM 0.32's own class for a CPU (`vllm.lora.punica_wrapper.punica_cpu`) gathers a copy of the adapter's matrix for each token,
which took nine tenths of an engine's time. It also reads the index -1 of a request without an adapter as the last slot, and
so adds that slot's adapter to it; here such a request gets nothing. Suffixes: `T` tokens or rows, `S` slots, `R` rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


@dataclass(frozen=True, slots=True)
class _Groups:
    """The rows of a batch by the slot of their adapter."""

    rows: int
    slots: list[tuple[int, Tensor | None]]
    """Each slot with its rows; None where all rows are of this one. Rows without an adapter are in none."""


class GroupedPunicaWrapper(PunicaWrapperCPU):
    """Computes products by slot. Results differ from vLLM's own class only by rounding, and where a row has no adapter."""

    def update_metadata(self, *arguments: Any, **keywords: Any) -> None:
        """Takes the adapters of the next batch over, once for all layers."""
        super().update_metadata(*arguments, **keywords)
        self._by_token = _grouped(self.token_lora_indices)
        self._by_request = _grouped(self.sampler_indices)

    def _apply_shrink(self, y: Tensor, x: Tensor, w_t_all: Tensor, scale: float) -> None:
        _shrink(y.view(-1, y.shape[-1]), x, w_t_all, scale, self._by_token)

    def _apply_expand(
        self, y: Tensor, x: Tensor, w_t_all: Tensor, y_offset: int, y_slice_size: int, add_inputs: bool = True
    ) -> None:
        _expand(y[:, y_offset : y_offset + y_slice_size], x, w_t_all, self._by_token, add_inputs)

    def add_lora_embedding(
        self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **_: Any
    ) -> None:
        """Adds `x @ lora_b` of each row's adapter to `y`, of an embedding."""
        _expand(y, x, lora_b_stacked, self._by_token, add_inputs)

    def add_lora_logits(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: Tensor,
        lora_b_stacked: Tensor,
        scale: float,
        *,
        buffer: Tensor | None = None,
        **_: Any,
    ) -> None:
        """Adds `x @ lora_a @ lora_b * scale` of each request's adapter to the logits `y`, of which a request has one row."""
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        if buffer is None:
            buffer = torch.zeros((len(x), lora_b_stacked.size(-1)), dtype=torch.float32, device=x.device)
        _shrink(buffer, x, lora_a_stacked, scale, self._by_request)
        _expand(y, buffer, lora_b_stacked, self._by_request, True)


def _grouped(slot_T: Tensor) -> _Groups:
    """Groups rows by slot; -1 is none."""
    slots = slot_T.unique().tolist()
    if len(slots) == 1:
        return _Groups(len(slot_T), [(slot, None) for slot in slots if slot >= 0])
    return _Groups(len(slot_T), [(slot, (slot_T == slot).nonzero()[:, 0]) for slot in slots if slot >= 0])


def _shrink(y_TR: Tensor, x: Tensor, weights_S: Tensor, scale: float, groups: _Groups) -> None:
    """Writes `x @ a * scale` of each row's adapter into `y`, in the precision of `y`; rows without one stay."""
    _check(x, groups)
    for slot, rows_T in groups.slots:
        weight = _matrix(weights_S, slot).to(y_TR.dtype)
        given = (x if rows_T is None else x[rows_T]).to(y_TR.dtype)
        y_TR[slice(None) if rows_T is None else rows_T, : len(weight)] = (given @ weight.T).mul_(scale)


def _expand(y: Tensor, x_TR: Tensor, weights_S: Tensor, groups: _Groups, add_inputs: bool) -> None:
    """Adds `x @ b` of each row's adapter to `y`, in the precision of `y`; both may be padded to different widths."""
    _check(x_TR, groups)
    y = y[:, : weights_S.shape[-2]]
    if not add_inputs:
        y.zero_()
    for slot, rows_T in groups.slots:
        weight = _matrix(weights_S, slot)[: y.shape[1]].to(y.dtype)
        if rows_T is None:
            y += x_TR.to(y.dtype) @ weight.T
        else:
            y.index_add_(0, rows_T, x_TR[rows_T].to(y.dtype) @ weight.T)


def _matrix(weights_S: Tensor, slot: int) -> Tensor:
    """Returns the matrix of a slot: of `[slots, out, in]` or `[slots, 1, out, in]`."""
    return weights_S[slot].view(weights_S.shape[-2:])


def _check(x: Tensor, groups: _Groups) -> None:
    if len(x) != groups.rows:
        raise ValueError(f"{len(x)} rows, and adapters of {groups.rows}: expected one for each")
