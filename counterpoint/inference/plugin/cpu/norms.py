"""Norms of a CPU's server are computed by vLLM's kernel for them, which vLLM (0.32) uses on a GPU alone.

Without it each norm is seven operations of torch: a fifth of a tiny model's forward pass of a few tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.platforms import current_platform

WIDTHS = 16
"""Elements of which a row has a multiple, or the kernel refuses it: it computes with as many, or half of them, at once."""


def compute_norms_by_kernel() -> None:
    """Has vLLM's norms in float32, in this process, be computed by the kernel; others, and those of another kind, stay."""
    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "fused_add_rms_norm"):
        return
    normed, added = torch.ops._C.rms_norm.default, torch.ops._C.fused_add_rms_norm.default

    def forward(self: RMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        plain = type(self) is RMSNorm and self.has_weight and self.variance_size_override is None
        if not plain or not x.dtype == self.weight.dtype == torch.float32:
            return self.forward_native(x, residual)
        if x.shape[-1] % WIDTHS or x.shape[-1:] != self.weight.shape:  # the kernel would read past the weights
            return self.forward_native(x, residual)
        if residual is None:
            x = x.contiguous()
            result = torch.empty_like(x)
            normed(result, x, self.weight, self.variance_epsilon)
            return result
        if residual.dtype != x.dtype or not (x.is_contiguous() and residual.is_contiguous()):
            return self.forward_native(x, residual)
        added(x, residual, self.weight, self.variance_epsilon)  # in place, as vLLM's models expect
        return x, residual

    RMSNorm.forward_cpu = forward
