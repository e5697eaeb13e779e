"""Faster kernels of attention than torch's own, from packages that may be installed; each computes one sample.

FlashAttention 4 compiles a kernel for the heads, the precision and a causal mask, and not for the length of a sample of more than
a tile. So after one call each, forward and backward, no row waits for it. What it compiled is kept where torch keeps its graphs.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Protocol

import torch
from torch import Tensor

from counterpoint.trainer.model.compiler import keep_to_own_cache


class Kernel(Protocol):
    """Causal attention of one sample, from a package."""

    name: str
    package: str
    majors: tuple[int, ...]
    """The compute capabilities, before the point, of the cards that have it."""

    def load(self) -> None:
        """Imports it; raises whatever that raises."""

    def forward(self, query_1THD: Tensor, key_1THD: Tensor, value_1THD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Returns the attended values `[1, T, heads, head_dim]`, and float32 `[1, heads, T]`, the log-sum-exp of the scores."""

    def backward(
        self, gradient_1THD: Tensor, query_1THD: Tensor, key_1THD: Tensor, value_1THD: Tensor,
        attended_1THD: Tensor, sums_1HT: Tensor, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Returns the gradients of queries, keys and values."""


class FlashAttention3:
    """Built from its source; torch has the calls."""

    name = "FlashAttention 3"
    package = "flash-attn-3"
    majors: tuple[int, ...] = (9,)

    def load(self) -> None:
        """Implements `Kernel`."""
        from torch.nn.attention import _fa3

        self._calls: Any = _fa3
        self._calls._fa3_import_module("flash_attn_interface")

    def forward(self, query_1THD: Tensor, key_1THD: Tensor, value_1THD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Implements `Kernel`."""
        tokens = query_1THD.shape[1]
        attended, sums = self._calls._fa3_run_forward(
            query_1THD, key_1THD, value_1THD, None, None, tokens, tokens, scale, True, -1, -1, None, num_splits=1
        )
        return attended, sums

    def backward(
        self, gradient_1THD: Tensor, query_1THD: Tensor, key_1THD: Tensor, value_1THD: Tensor,
        attended_1THD: Tensor, sums_1HT: Tensor, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Implements `Kernel`."""
        tokens = query_1THD.shape[1]
        query, key, value = self._calls._fa3_run_backward(
            gradient_1THD, query_1THD, key_1THD, value_1THD, attended_1THD, sums_1HT, None, None, tokens, tokens,
            scale, True, -1, -1, torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return query, key, value


class FlashAttention4:
    """Python that compiles itself; its functions for a backend such as this are named with an underscore."""

    name = "FlashAttention 4"
    package = "flash-attn-4"
    majors: tuple[int, ...] = (9, 10)

    def load(self) -> None:
        """Implements `Kernel`."""
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        keep_to_own_cache()
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", os.path.join(cache_dir(), "flash_attention"))
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        self._calls: Any = importlib.import_module("flash_attn.cute.interface")  # reads these variables

    def forward(self, query_1THD: Tensor, key_1THD: Tensor, value_1THD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Implements `Kernel`."""
        attended, sums, *_ = self._calls._flash_attn_fwd(
            query_1THD, key_1THD, value_1THD, softmax_scale=scale, causal=True, return_lse=True
        )
        return attended, sums

    def backward(
        self, gradient_1THD: Tensor, query_1THD: Tensor, key_1THD: Tensor, value_1THD: Tensor,
        attended_1THD: Tensor, sums_1HT: Tensor, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Implements `Kernel`."""
        query, key, value = self._calls._flash_attn_bwd(
            query_1THD, key_1THD, value_1THD, attended_1THD, gradient_1THD, sums_1HT,
            softmax_scale=scale, causal=True, deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return query, key, value


KERNELS: dict[str, Kernel] = {kernel.package: kernel for kernel in (FlashAttention3(), FlashAttention4())}
"""By package; the first that is installed and proven is used."""


@torch.library.custom_op("counterpoint::sample_attention", mutates_args=())
def sample_attention(
    query_THD: Tensor, key_THD: Tensor, value_THD: Tensor, scale: float, package: str
) -> tuple[Tensor, Tensor]:
    """Computes causal attention of one sample by a kernel of `KERNELS`; an operator, so that its results can be kept.

    Returns `[T, heads, head_dim]`, and float32 `[heads, T]`, the log-sum-exp of the scores, which has no gradient.
    """
    attended, sums = KERNELS[package].forward(query_THD[None], key_THD[None], value_THD[None], scale)
    return attended[0], sums[0]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *states, ctx.scale, ctx.package = inputs
    ctx.save_for_backward(*states, *output)


def _gradients(ctx: Any, gradient_THD: Tensor, _of_sums: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, attended, sums = (tensor[None] for tensor in ctx.saved_tensors)
    gradient = gradient_THD.contiguous()[None]  # an expanded one would be compiled for
    found = KERNELS[ctx.package].backward(gradient, query, key, value, attended, sums, ctx.scale)
    return (*(each[0] for each in found), None, None)


sample_attention.register_autograd(_gradients, setup_context=_keep)
