"""The row of attention alone: torch's kernel, and the one that a trainer uses on this card, forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from counterpoint.trainer.model import attention
from counterpoint.trainer.model.kernels.row import LONG_SAMPLE, chosen_for
from perf.gpu.steps import Figures
from perf.step_speed import SHAPES

Attend = Callable[..., Tensor]

REPEATED = 5
PRODUCTS = {"forward": 2, "backward": 5}
"""Matrix products over the tokens of a sample, of which a causal mask leaves half."""


def speeds(device: str, _directory: Path) -> Figures:
    """Returns TFLOP/s of one sample a row with the heads of Qwen3-0.6B: of 4k, 16k and 64k tokens, or on a CPU small."""
    figures: Figures = {}
    for tokens in (LONG_SAMPLE, 16_384, 65_536) if device == "cuda" else (256,):
        figures |= _speeds_of(device, tokens)
    return figures


def _speeds_of(device: str, tokens: int) -> Figures:
    on_gpu = device == "cuda"
    shape = SHAPES["0.6b" if on_gpu else "small"]
    size = shape["head_dim"]
    counts = (shape["num_attention_heads"], *[shape["num_key_value_heads"]] * 2)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    states = tuple(
        torch.randn(1, count, tokens, size, device=device, dtype=dtype, requires_grad=True) for count in counts
    )
    figures: Figures = {}
    ways: dict[str, Attend] = {"": _used}
    if on_gpu:
        query_THD, value_THD = (state[0].transpose(0, 1) for state in (states[0], states[2]))
        package = chosen_for(query_THD, value_THD, None, attention._together)
        figures["long samples by"] = package or "torch's own"
        if package is not None:
            ways["torch's "] = _own
    operations = counts[0] * size * tokens**2
    for way, attend in ways.items():
        for direction, seconds in _seconds(attend, states, on_gpu).items():
            name = f"{way}{direction} TFLOP/s, {tokens} tokens"
            figures[name] = round(PRODUCTS[direction] * operations / seconds / 1e12, 3)
    return figures


def _used(query_1HTD: Tensor, key_1HTD: Tensor, value_1HTD: Tensor) -> Tensor:
    return attention.per_sample_attention(torch.nn.Identity(), query_1HTD, key_1HTD, value_1HTD, None)[0]


def _own(query_1HTD: Tensor, key_1HTD: Tensor, value_1HTD: Tensor) -> Tensor:
    query_THD, key_THD, value_THD = (state[0].transpose(0, 1) for state in (query_1HTD, key_1HTD, value_1HTD))
    return attention._together(query_THD, key_THD, value_THD, [len(query_THD)], None)


def _seconds(attend: Attend, states: tuple[Tensor, ...], on_gpu: bool) -> dict[str, float]:
    """Returns the median seconds of each direction, without the first, which warms up."""
    spent: dict[str, list[float]] = {direction: [] for direction in PRODUCTS}
    for _ in range(REPEATED + 1):
        began = _now(on_gpu)
        found = attend(*states)
        spent["forward"].append(_now(on_gpu) - began)
        gradient = torch.ones_like(found)
        began = _now(on_gpu)
        torch.autograd.grad(found, states, gradient)
        spent["backward"].append(_now(on_gpu) - began)
    return {direction: statistics.median(each[1:]) for direction, each in spent.items()}


def _now(on_gpu: bool) -> float:
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter()
