"""Keeps what attention returned in a layer that is computed again (`recompute.py`): its kernel runs once.

What is kept has the log-sum-exp, which gradients need. In half precision, a byte of it saves as many operations as the sample has
tokens. A byte of all that a layer saves for its backward pass saves some 700 to 2,000, so attention over short samples is made
again.

Torch's contexts for selective checkpointing are around the call of attention, not around the layer: each operator inside takes
microseconds more, and compiled parts are left as they are. Source: Li et al., "DISTFLASHATTN", 2023, where layers are computed
again from attention's output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operator
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from counterpoint.trainer.model.kernels.packages import sample_attention

KERNELS = [
    sample_attention._opoverload,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._efficient_attention_forward.default,
]
"""The operators whose results are kept. Any other one, such as those of attention without a fused kernel, is computed again."""

LEAST_TOKENS = 512
"""A call in which no token attends to so many is made again."""

Kept = deque[AbstractContextManager[Any]]
"""What a pass through one layer keeps: a context for each call, in order, in which the kernel's results are there."""

_now: ContextVar[tuple[Kept, bool] | None] = ContextVar("_now", default=None)


@contextmanager
def keeping(kept: Kept | None, again: bool) -> Iterator[None]:
    """Has `computed_once`, inside and on this thread, put results into `kept`, or with `again` take them from there.

    With None it keeps nothing.
    """
    token = _now.set(None if kept is None else (kept, again))
    try:
        yield
    finally:
        _now.reset(token)


def computed_once(attention: Callable[..., Tensor], longest: int, *args: Any, **kwargs: Any) -> Tensor:
    """Calls `attention`, of samples of up to `longest` tokens; keeps its kernel's results for the layer's next computation."""
    if (now := _now.get()) is None or longest < LEAST_TOKENS:
        return attention(*args, **kwargs)
    kept, again = now
    if again:
        context = kept.popleft()
    else:
        context, later = create_selective_checkpoint_contexts(KERNELS)
        kept.append(later)
    with context:
        return attention(*args, **kwargs)
