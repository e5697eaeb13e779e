"""The arithmetic of an output layer for some tokens at a time: log-probabilities, entropies and their gradients.

`counterpoint/trainer/model/head.py` calls it with a model. Suffixes: `P` tokens, `C` tokens of a chunk, `H` hidden size, `V`
vocabulary, `W` a part of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

CHUNK_BYTES = 2**27
"""The least size of a chunk's logits in float32, and that on a CPU. Three tensors of this size are in use at once."""

FULL_TOKENS = 1024
"""Tokens of a chunk that keep a GPU busy: each is summed up by itself, on one of some hundred processors, several at once."""

MEMORY_SHARE = 128
"""A chunk's logits take at most one part in so many of a GPU's memory."""

ALIGNMENT = 64
"""What a part of the vocabulary is a multiple of, since products of other sizes are slow."""

LEAST_LOGARITHM = -1000.0
"""The least logarithm of a probability p in p log p, which is 0 for less, in float64, too; and for p = 0, where it would be 0
times infinity."""


def chunked_outputs(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    targets_P: Tensor,
    divisor_P: Tensor | None,
    *,
    entropy_gradient: bool = False,
    arithmetic: ChunkArithmetic | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities of targets, and entropies, `[P]` each, of softmax(logits / divisor); float32 or higher.

    Without a divisor it is 1. Without `entropy_gradient`, the entropies have no gradient. `arithmetic`: of a compiler.
    """
    if arithmetic is not None and divisor_P is None:  # so that there are few graphs
        divisor_P = torch.ones(len(targets_P), device=targets_P.device)
    values_P, entropies_P = _Chunked.apply(
        hidden_PH, weight_VH, bias_V, targets_P, divisor_P, entropy_gradient, arithmetic or ChunkArithmetic()
    )
    return values_P, entropies_P


class _Chunked(torch.autograd.Function):
    """With z = logits / divisor and p = softmax(z): log p_t = z_t - log sum exp z, and the entropy H = -sum p log p.

    d log p_t / d z_j = [j = t] - p_j, and d H / d z_j = -p_j (log p_j + H). The forward pass takes some tokens at a time. The
    backward pass computes logits again, in tiles of many tokens and some of the vocabulary, so that the gradient of most weights
    is one product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_P: Tensor,
        divisor_P: Tensor | None,
        entropy_gradient: bool,
        arithmetic: ChunkArithmetic,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden_PH.dtype, torch.float32)
        of_tokens = [hidden_PH.new_empty(len(hidden_PH), dtype=exact) for _ in range(4)]
        for rows in _slices(len(hidden_PH), _tile(hidden_PH.device, len(weight_VH)) // len(weight_VH)):
            logits_CV = nn.functional.linear(hidden_PH[rows], weight_VH, bias_V)
            of_chunk = (_column(targets_P, rows), _column(divisor_P, rows))
            found = arithmetic.of(logits_CV).summed_up(logits_CV, *of_chunk, bias_V is not None)
            del logits_CV  # before the next chunk's
            for whole_P, part_C1 in zip(of_tokens, found, strict=True):
                whole_P[rows] = part_C1[:, 0]
        values_P, entropies_P, highest_P, sums_P = of_tokens
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropies_P)
        ctx.entropy_gradient, ctx.arithmetic = entropy_gradient, arithmetic
        ctx.save_for_backward(hidden_PH, weight_VH, bias_V, targets_P, divisor_P, entropies_P, highest_P, sums_P)
        return values_P, entropies_P

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_values_P: Tensor, grad_entropies_P: Tensor) -> tuple[Any, ...]:
        hidden_PH, weight_VH, bias_V, targets_P, divisor_P, entropies_P, highest_P, sums_P = ctx.saved_tensors
        tokens, vocabulary = len(hidden_PH), len(weight_VH)
        tile = _tile(hidden_PH.device, vocabulary)
        height = max(1, min(tokens, 2 * math.isqrt(tile)))
        width = tile // height
        # What several products are added up in is precise; autograd rounds the sum to the precision of its parameter.
        exact = torch.promote_types(weight_VH.dtype, torch.float32)
        grads = [
            torch.zeros_like(given, dtype=exact if several else given.dtype) if needed else None
            for given, needed, several in (
                (hidden_PH, ctx.needs_input_grad[0], True),
                (weight_VH, ctx.needs_input_grad[1], tokens > height),
                (bias_V, ctx.needs_input_grad[2], True),
            )
        ]
        grad_hidden, grad_weight, grad_bias = grads
        rounded = weight_VH.dtype if grad_bias is None else exact
        for rows in _slices(tokens, height):
            of_tokens = [
                _column(each, rows)
                for each in (
                    divisor_P,
                    highest_P,
                    sums_P,
                    grad_values_P,
                    entropies_P if ctx.entropy_gradient else None,
                    grad_entropies_P if ctx.entropy_gradient else None,
                )
            ]
            for part in _slices(vocabulary, width - width % ALIGNMENT or width):
                weight_WH = weight_VH[part]
                logits_CW = nn.functional.linear(hidden_PH[rows], weight_WH, None if bias_V is None else bias_V[part])
                place_C1 = targets_P[rows, None] - part.start
                grad_CW = ctx.arithmetic.of(logits_CW).slope(logits_CW, rounded, place_C1, *of_tokens)
                del logits_CW
                if grad_bias is not None:
                    grad_bias[part] += grad_CW.sum(0)
                grad_CW = grad_CW.to(weight_VH.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], grad_CW, weight_WH)
                if grad_weight is not None:
                    _add_product(grad_weight[part], grad_CW.T, hidden_PH[rows])
                del grad_CW
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _summed_up(
    logits_CV: Tensor, target_C1: Tensor, divisor_C1: Tensor | None, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns of each token log p of its target, H, the highest z, and the logarithm of sum exp(z - highest), `[C, 1]` each.

    The last are two numbers, since their sum would round a small logarithm to the precision of a large logit. `logits_CV` may be
    changed. Each line that takes all logits waits for the memory, not for the arithmetic, so there are few.
    """
    scaled_CV = _scaled(logits_CV, divisor_C1)
    highest_C1 = scaled_CV.amax(-1, keepdim=True).to(_exact(scaled_CV))
    shifted_CV = _minus(scaled_CV, highest_C1)
    del scaled_CV
    powers_CV = shifted_CV.exp()
    total_C1 = powers_CV.sum(-1, keepdim=True)
    sums_C1 = total_C1.log()
    values_C1 = shifted_CV.gather(-1, target_C1) - sums_C1
    if has_bias:  # which alone may forbid a token
        shifted_CV.clamp_(min=LEAST_LOGARITHM)
    return values_C1, sums_C1 - powers_CV.mul_(shifted_CV).sum(-1, keepdim=True) / total_C1, highest_C1, sums_C1


def _slope(
    logits_CW: Tensor,
    rounded: torch.dtype,
    place_C1: Tensor,
    divisor_C1: Tensor | None,
    highest_C1: Tensor,
    sums_C1: Tensor,
    grad_values_C1: Tensor,
    entropies_C1: Tensor | None,
    grad_entropies_C1: Tensor | None,
) -> Tensor:
    """Returns the gradient by the logits of a part of the vocabulary, `rounded`; `logits_CW` may be changed.

    `place_C1` is the target's place in the part, below 0 or beyond its end if it is not in it. The entropies are None where they
    have no gradient. What concerns a token is put together before it meets its logits.
    """
    shifted_CW = _minus(_scaled(logits_CW, divisor_C1), highest_C1)
    if divisor_C1 is not None:
        grad_values_C1 = grad_values_C1 / divisor_C1
    if entropies_C1 is None or grad_entropies_C1 is None:
        grad_CW = shifted_CW.exp_().mul_(-grad_values_C1 * (-sums_C1).exp())
    else:
        by_entropy_C1 = grad_entropies_C1 if divisor_C1 is None else grad_entropies_C1 / divisor_C1
        shifted_CW.sub_(sums_C1)
        grad_CW = shifted_CW.exp()
        shifted_CW.clamp_(min=LEAST_LOGARITHM)
        grad_CW.mul_(shifted_CW.add_(entropies_C1).mul_(-by_entropy_C1).sub_(grad_values_C1))
    size = logits_CW.shape[-1]
    if torch.compiler.is_compiling():  # as part of the same loop
        every_W = torch.arange(size, device=logits_CW.device)
        return (grad_CW + torch.where(every_W == place_C1, grad_values_C1, 0.0)).to(rounded)
    inside_C1 = (place_C1 >= 0) & (place_C1 < size)
    grad_CW.scatter_add_(-1, place_C1.clamp(0, size - 1), grad_values_C1.masked_fill(~inside_C1, 0))
    return grad_CW.to(rounded)


class ChunkArithmetic(NamedTuple):
    """What computes a chunk between its products."""

    summed_up: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _summed_up
    slope: Callable[..., Tensor] = _slope

    @classmethod
    def compiled(cls, compiler: Callable[..., Any] | None = None) -> ChunkArithmetic:
        """Returns the same by torch.compile, which takes the logits of a chunk from memory once, and not for each operation.

        A graph is made for chunks of any size: otherwise the last one of a row, and the next row, would be compiled anew.
        """
        return cls(*((compiler or torch.compile)(each, dynamic=True) for each in (_summed_up, _slope)))

    def of(self, logits_CW: Tensor) -> ChunkArithmetic:
        """Returns what computes these: of one token, or one number of each, what is not compiled, since that would be anew."""
        return ChunkArithmetic() if 1 in logits_CW.shape else self


def _column(each_P: Tensor | None, rows: slice) -> Tensor | None:
    """Returns a copy, `[C, 1]`: of a view the compiler would check what it is a part of, and compile anew for another whole."""
    return None if each_P is None else each_P[rows, None].clone(memory_format=torch.contiguous_format)


def chunk_bytes(vocabulary: int, memory: int | None) -> int:
    """Returns the bytes of a chunk's logits in float32, on a GPU with `memory` bytes, or on a CPU (None).

    They are of `FULL_TOKENS` tokens where the memory allows it: 220, of 152,000 words, used a hundredth of an H200's bandwidth.
    """
    return (
        CHUNK_BYTES if memory is None else max(CHUNK_BYTES, min(4 * vocabulary * FULL_TOKENS, memory // MEMORY_SHARE))
    )


def device_memory(device: torch.device) -> int | None:
    """Returns the bytes of a GPU's memory; None of another device."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _tile(device: torch.device, vocabulary: int) -> int:
    """Returns the elements of one chunk."""
    return chunk_bytes(vocabulary, device_memory(device)) // 4


def _slices(length: int, size: int) -> Iterator[slice]:
    """Returns slices of at most `size`, and at least 1, that cover `length`."""
    size = max(1, size)
    return (slice(first, min(first + size, length)) for first in range(0, length, size))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _scaled(logits_CW: Tensor, divisor_C1: Tensor | None) -> Tensor:
    """Returns logits divided, then in float32 or higher."""
    return logits_CW if divisor_C1 is None else logits_CW.to(_exact(logits_CW)).div_(divisor_C1)


def _minus(scaled_CW: Tensor, highest_C1: Tensor) -> Tensor:
    """Returns the difference in the precision of `highest_C1`, in place where that can be."""
    return scaled_CW.sub_(highest_C1) if scaled_CW.dtype == highest_C1.dtype else scaled_CW - highest_C1
