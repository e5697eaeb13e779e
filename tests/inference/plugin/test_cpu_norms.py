"""Norms by vLLM's kernel are those of its operations of torch."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.slow  # imports vLLM


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    from vllm.model_executor.layers.layernorm import RMSNorm

    monkeypatch.setattr(RMSNorm, "forward_cpu", RMSNorm.forward_cpu)  # puts it back
    from counterpoint.inference.plugin.cpu.norms import compute_norms_by_kernel

    compute_norms_by_kernel()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_are_those_of_the_operations(dtype: torch.dtype) -> None:
    """Also of heads, which are a part of a wider row; numbers that are not float32 are the same bit for bit."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    torch.manual_seed(0)
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(32, dtype=dtype)
    norm.weight.copy_(torch.randn(32))
    tolerance = 1e-5 if dtype == torch.float32 else 0.0
    heads = torch.randn(7, 5 * 32).to(dtype)[:, 32:96].view(7, 2, 32)
    for rows in (torch.randn(7, 32).to(dtype), heads):
        torch.testing.assert_close(norm.forward_cpu(rows), norm.forward_native(rows), rtol=0, atol=tolerance)
    rows, residual = torch.randn(7, 32).to(dtype), torch.randn(7, 32).to(dtype)
    wide = torch.randn(7, 64).to(dtype)[:, :32]
    for given in ((rows, residual), (wide, residual)):
        expected = norm.forward_native(*(each.clone() for each in given))
        torch.testing.assert_close(norm.forward_cpu(*given), expected, rtol=0, atol=tolerance)


@torch.inference_mode()
def test_rows_that_the_kernel_does_not_take_are_left_to_the_operations() -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.layernorm import RMSNorm

    with set_current_vllm_config(VllmConfig()):
        norm, narrow = RMSNorm(20), RMSNorm(16)
    rows = torch.randn(3, 20)
    assert torch.equal(norm.forward_cpu(rows), norm.forward_native(rows))
    with pytest.raises(RuntimeError, match="must match"):
        narrow.forward_cpu(torch.randn(3, 32))
