"""What a card computes and reads in a second: from its maker's data sheet, or measured for this machine's CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from counterpoint.job.plan.devices import CPU, Gpus


@dataclass(frozen=True, slots=True)
class CardRates:
    """One card's highest rates, without sparsity."""

    half: float
    """Operations a second in bfloat16 or float16, on tensor cores; a multiplication and an addition are two."""
    single: float
    """Operations a second in float32, without TF32."""
    bandwidth: float
    """Bytes a second from its memory."""


RATES = {
    "H100-80": CardRates(989e12, 67e12, 3.35e12),
    "H200-141": CardRates(989e12, 67e12, 4.8e12),
    "A100-40": CardRates(312e12, 19.5e12, 1.555e12),
    "A100-80": CardRates(312e12, 19.5e12, 2.039e12),
    "L40S-48": CardRates(362e12, 91.6e12, 0.864e12),
    "B200-192": CardRates(2250e12, 75e12, 7.75e12),
}
"""Of NVIDIA's data sheets: "H100 Tensor Core GPU" (SXM), "H200 Tensor Core GPU" (SXM), "A100 Tensor Core GPU" (SXM), "L40S", and
for a B200 an eighth of "HGX B200". Where a sheet has operations with sparsity, half of them."""

_SIDE, _BYTES = 768, 2**26
_ROUNDS = 5


def rates_of(gpus: Gpus) -> CardRates:
    """Returns the rates of a card. Raises `ValueError` for one that is not in the table."""
    if gpus.name == CPU:
        return measured_cpu()
    if (found := RATES.get(gpus.name.upper())) is None:
        raise ValueError(f"--gpus {gpus.name}: its rates are not known; expected one of {', '.join(RATES)}, or {CPU}")
    return found


def measured_cpu() -> CardRates:
    """Measures one thread of this processor: products of matrices, and the copy of an array larger than its caches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        half, single = (_operations(dtype) for dtype in (torch.bfloat16, torch.float32))
        source = torch.ones(_BYTES, dtype=torch.uint8)
        target = torch.empty_like(source)
        return CardRates(half, single, 2 * _BYTES / _fastest(lambda: target.copy_(source)))
    finally:
        torch.set_num_threads(threads)


def _operations(dtype: torch.dtype) -> float:
    left, right = torch.ones(_SIDE, _SIDE, dtype=dtype), torch.ones(_SIDE, _SIDE, dtype=dtype)
    return 2 * _SIDE**3 / _fastest(lambda: left @ right)


def _fastest(work: Callable[[], object]) -> float:
    """Returns the seconds of the fastest of some calls: what else runs here makes others slower."""
    seconds = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
