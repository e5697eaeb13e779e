"""Chooses the kernels of a packed row's attention on a GPU, and proves them by computation before the first row uses them.

Torch has FlashAttention 2, which takes all samples of a row at once. Packages have faster kernels for Hopper and Blackwell cards:
FlashAttention 3 (`flash_attn_interface`) and 4 (the extra `flash`). They read whole tiles of keys and values, past the end of a
sample too, and weigh what follows it by zero (Dao-AILab/flash-attention, pull request 2407). Zero times NaN is NaN, so a run's
sample could spoil another run's. So a long sample is computed alone, as a tensor past whose end a card reads zeros. Short ones,
whose attention is a small part of a step, stay together in torch's kernel.

Torch can put these packages in place of its own kernels (`activate_flash_attention_impl`). That is not used: it would also change
calls that are not proven here, and torch 2.13 expects two results of version 4, which has returned more since 4.0.0b19.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.model.kernels.kept import computed_once
from counterpoint.trainer.model.kernels.packages import KERNELS, Kernel, sample_attention
from counterpoint.trainer.model.kernels.proof import Heads, prove

logger = logging.getLogger(__name__)

LONG_SAMPLE = 4096
"""Tokens from which on a sample is computed alone: its attention then takes longer than it takes to call one more kernel."""

Together = Callable[[Tensor, Tensor, Tensor, Sequence[int], float | None], Tensor]
"""Computes all samples of a row in torch's kernel: queries, keys and values `[T, heads, head_dim]`, lengths, scaling."""

_PROOF_LENGTHS = (37, 300, 1, 130)
_LONG_PROOF_LENGTHS = (301, 777, 512)
"""Of samples that are computed alone: each is longer than the tiles of one step, as all long samples are."""

_chosen: dict[Heads, str | None] = {}
"""The package for long samples; None where torch's kernel computes all."""


def packed_attention(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    sample_lengths: Sequence[int],
    scaling: float | None,
    together: Together,
) -> Tensor:
    """Computes causal attention within each sample by the kernels that are proven for such heads; the first call proves them.

    Returns `[T, heads, head_dim]`. Raises `ValueError` if torch's own kernel computes something else than attention.
    """
    package = chosen_for(query_THD, value_THD, scaling, together)
    longest = max(sample_lengths)
    return computed_once(
        _attend, longest, query_THD, key_THD, value_THD, sample_lengths, scaling, together, package, LONG_SAMPLE
    )


def chosen_for(query_THD: Tensor, value_THD: Tensor, scaling: float | None, together: Together) -> str | None:
    """Returns the package for long samples with such heads; None where torch's kernel, proven as well, computes all."""
    (heads, size), (groups, value_size) = query_THD.shape[1:], value_THD.shape[1:]
    asked = Heads(query_THD.device, query_THD.dtype, heads, groups, size, value_size, scaling)
    if asked not in _chosen:
        _chosen[asked] = _choose(asked, together)
    return _chosen[asked]


def _attend(
    query_THD: Tensor,
    key_THD: Tensor,
    value_THD: Tensor,
    sample_lengths: Sequence[int],
    scaling: float | None,
    together: Together,
    package: str | None,
    least: int,
) -> Tensor:
    """Computes samples of `least` tokens and more by `package`, each alone, and those between them together."""
    if package is None or max(sample_lengths) < least:
        return together(query_THD, key_THD, value_THD, sample_lengths, scaling)
    scale = query_THD.shape[-1] ** -0.5 if scaling is None else scaling
    parts = _parts(sample_lengths, least)
    sizes = [sum(part) for part in parts]
    attended = [
        sample_attention(query, key, value, scale, package)[0]
        if part[0] >= least
        else together(query, key, value, part, scaling)
        for part, query, key, value in zip(
            parts, query_THD.split(sizes), key_THD.split(sizes), value_THD.split(sizes), strict=True
        )
    ]
    return attended[0] if len(attended) == 1 else torch.cat(attended)


def _parts(sample_lengths: Sequence[int], least: int) -> list[list[int]]:
    """Divides a row: each long sample is a part, and so are the short ones between two of them."""
    parts: list[list[int]] = []
    for length in sample_lengths:
        if parts and length < least and parts[-1][0] < least:
            parts[-1].append(length)
        else:
            parts.append([length])
    return parts


def _choose(heads: Heads, together: Together) -> str | None:
    """Returns the package for long samples; None for torch's own kernel, which must be right in any case."""

    def own(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return together(query, key, value, _PROOF_LENGTHS, heads.scaling)

    try:
        prove(own, heads, _PROOF_LENGTHS)
    except ValueError as error:
        raise ValueError(
            f'torch\'s FlashAttention 2 is wrong on this card for {heads}: {error}; use dtype = "float32"'
        ) from error
    major, minor = torch.cuda.get_device_capability(heads.device)
    for package, kernel in KERNELS.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if major not in kernel.majors:
            needed = " or ".join(f"{each}.x" for each in kernel.majors)
            logger.warning(
                "%s %s is installed, and needs a card of compute capability %s, which this one (%d.%d) does not have; "
                "torch's FlashAttention 2 is used",
                package, found, needed, major, minor,
            )  # fmt: skip
        elif _is_proven(kernel, found, heads, together):
            logger.info(
                "attention of samples from %d tokens on: %s (%s %s), proven for %s",
                LONG_SAMPLE, kernel.name, package, found, heads,
            )  # fmt: skip
            return package
    logger.info("attention: torch's FlashAttention 2, proven for %s", heads)
    return None


def _is_proven(kernel: Kernel, found: str, heads: Heads, together: Together) -> bool:
    """Whether a kernel of a package computes attention; if not, the reason is logged."""
    logger.info("proving %s (%s %s), which may compile its kernels first", kernel.name, kernel.package, found)
    try:
        prove_kernel(kernel, heads, together)
    except Exception as error:
        if is_fatal(error):
            raise
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        logger.warning(
            "%s %s is not used for %s: %s. Another kernel is, which is slower. Install another version of it, or none",
            kernel.package, found, heads, said,
        )  # fmt: skip
        return False
    return True


def prove_kernel(kernel: Kernel, heads: Heads, together: Together) -> None:
    """Imports a kernel and compares it with attention in float32. Raises whatever it raises, `ValueError` if it is wrong."""

    def alone(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attend(query, key, value, _LONG_PROOF_LENGTHS, heads.scaling, together, kernel.package, 1)

    kernel.load()
    prove(alone, heads, _LONG_PROOF_LENGTHS, spoilt=1)
