"""A step on a GPU is the CPU's, by every way to save its memory, with the kernels of a GPU."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

from counterpoint.trainer.model import attention, chunks
from counterpoint.trainer.model.kernels.packages import KERNELS, sample_attention
from counterpoint.trainer.model.kernels.proof import Heads, prove
from counterpoint.trainer.model.kernels.row import prove_kernel
from counterpoint.trainer.ranks import Ranks
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import make_lone_run

pytestmark = pytest.mark.slow

LORA = {"rank": 8, "alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj", "experts"]}

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "adapter": ({}, {"lora": LORA}),
    "checkpointing": ({"activation_checkpointing": True}, {"lora": LORA}),
    "offload": ({"optimizer_offload": True}, {}),
    "deterministic": ({"deterministic": True}, {"lora": LORA}),
    "compiled": ({"compile": True}, {}),
    "several updates": ({}, {"updates_per_step": 2}),
    "reference": ({}, {"lora": LORA, "reference": {"reward_coefficient": 0.4}}),
    "value head": ({}, {"value_head": {}}),
}
"""The settings of the trainer, and of `[training]`, by name."""


def train(
    directory: Path, model: Path, device: torch.device, trainer: dict[str, Any], training: dict[str, Any], routed: bool
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Metrics of three steps, and what is trained in the end, on the CPU."""
    given = {"dtype": "float32", "compile": False, **trainer}
    ranks = Ranks(0, 1, device, None)
    lone = make_lone_run(directory, model, given, ranks=ranks, learning_rate=1e-3, optimizer="sgd", **training)
    lines = [lone.train(make_batch(step, routed=routed)) for step in (1, 2, 3)]
    return lines, {name: weight.cpu() for name, weight in lone.weights().items()}


def test_a_tensor_of_the_cpu_is_refused_beside_one_of_the_device(device: torch.device) -> None:
    """Which is what the tests below find also on the device in the host's memory."""
    own, other = torch.ones(4, 4, device=device), torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=r"CPU|device"):
        own @ other
    with pytest.raises(RuntimeError, match="device"):
        own + other
    assert (own * torch.tensor(2.0)).sum().item() == 32, "a scalar is taken"
    assert own[torch.tensor([0, 2])].device == own.device, "and indices are"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mixture", [False, True])
def test_three_steps_are_those_of_a_cpu(
    dense_directory: Path, moe_directory: Path, tmp_path: Path, device: torch.device, way: str, mixture: bool
) -> None:
    model = moe_directory if mixture else dense_directory
    trainer, training = WAYS[way]
    found, weights = train(tmp_path / "gpu", model, device, trainer, training, mixture)
    expected, plain = train(tmp_path / "cpu", model, torch.device("cpu"), {}, training, mixture)
    for line, wanted in zip(found, expected, strict=True):
        for name in ("loss", "entropy", "grad_norm", "mismatch_kl"):
            assert line[name] == pytest.approx(wanted[name], rel=1e-3, abs=1e-4), name
    for name, weight in plain.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-4)


def test_bfloat16_with_an_adapter_follows_float32(dense_directory: Path, tmp_path: Path, device: torch.device) -> None:
    """As far as its precision goes: eight bits of a log-probability."""
    found, _ = train(tmp_path / "half", dense_directory, device, {"dtype": "bfloat16"}, {"lora": LORA}, routed=False)
    expected, _ = train(tmp_path / "whole", dense_directory, device, {}, {"lora": LORA}, routed=False)
    for line, wanted in zip(found, expected, strict=True):
        assert line["loss"] == pytest.approx(wanted["loss"], rel=0.1, abs=0.05)
        assert line["entropy"] == pytest.approx(wanted["entropy"], rel=0.05)


def test_chunks_take_less_memory_than_whole_logits(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are 4,096 tokens and 32,000 words; their logits take 524 MB."""
    hidden_PH = torch.randn(4096, 64, device=gpu, requires_grad=True)
    weight_VH = torch.randn(32_000, 64, device=gpu, requires_grad=True)
    targets_P = torch.randint(0, 32_000, (4096,), device=gpu)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2**24)
    monkeypatch.setattr(chunks, "FULL_TOKENS", 1)
    torch.cuda.reset_peak_memory_stats(gpu)
    before = torch.cuda.memory_allocated(gpu)
    values_P, _ = chunks.chunked_outputs(hidden_PH, weight_VH, None, targets_P, torch.ones(4096, device=gpu))
    values_P.sum().backward()
    assert torch.cuda.max_memory_allocated(gpu) - before < 2**28
    exact = torch.log_softmax(hidden_PH.detach().double() @ weight_VH.detach().double().T, -1)
    expected_P = exact.gather(-1, targets_P[:, None])[:, 0]
    assert float((values_P.detach() - expected_P).abs().max()) < 1e-3


@pytest.mark.parametrize("groups", [2, 8])
def test_one_kernel_takes_all_samples_of_a_row(gpu: torch.device, groups: int) -> None:
    """Values and gradients, against one call a sample in float64."""
    if torch.cuda.get_device_capability(gpu) < (8, 0):
        pytest.skip("FlashAttention-2 needs an Ampere GPU or a newer one")
    lengths = [37, 1, 256, 90]
    tokens = sum(lengths)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 8, tokens, 64), (1, groups, tokens, 64), (1, groups, tokens, 64))
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    half = [tensor.detach().to(gpu, torch.bfloat16).requires_grad_() for tensor in exact]
    module = torch.nn.Identity()
    expected, _ = attention.per_sample_attention(
        module, exact[0], exact[1], exact[2], None, scaling=0.1, sample_lengths=lengths
    )
    assert attention._has_packed_kernel(half[0])
    found, _ = attention.per_sample_attention(
        module, half[0], half[1], half[2], None, scaling=0.1, sample_lengths=lengths
    )
    torch.testing.assert_close(found.double().cpu(), expected, rtol=0.05, atol=0.02)
    expected.square().sum().backward()
    found.float().square().sum().backward()
    for ours, theirs in zip(half, exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double().cpu(), theirs.grad, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("size", [64, 128, 256])
def test_torchs_kernel_keeps_a_sample_that_is_no_number_to_itself(gpu: torch.device, size: int) -> None:
    """Values and gradients. The proof when a model is loaded takes no sample that is NaN for this kernel."""
    if torch.cuda.get_device_capability(gpu) < (8, 0):
        pytest.skip("FlashAttention 2 needs an Ampere GPU or a newer one")
    heads = Heads(gpu, torch.bfloat16, 8, 2, size, size, None)
    lengths = (37, 300, 1, 130, 9)
    for spoilt in range(len(lengths)):
        prove(lambda query, key, value: attention._together(query, key, value, lengths, None), heads, lengths, spoilt)


@pytest.mark.parametrize(("heads", "groups", "size"), [(16, 8, 128), (32, 8, 128), (8, 8, 64), (8, 2, 256)])
@pytest.mark.parametrize("package", KERNELS)
def test_a_packages_kernel_is_proven(gpu: torch.device, package: str, heads: int, groups: int, size: int) -> None:
    kernel = KERNELS[package]
    if torch.cuda.get_device_capability(gpu)[0] not in kernel.majors:
        pytest.skip(f"{kernel.name} needs a card of another compute capability")
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    proven = Heads(gpu, torch.bfloat16, heads, groups, size, size, None)
    prove_kernel(kernel, proven, attention._together)


def test_version_4_compiles_for_no_row(gpu: torch.device) -> None:
    """What the proof compiled is for samples of all lengths, and for states that lie otherwise in memory."""
    kernel = KERNELS["flash-attn-4"]
    if torch.cuda.get_device_capability(gpu)[0] not in kernel.majors:
        pytest.skip(f"{kernel.name} needs a card of another compute capability")
    interface = pytest.importorskip("flash_attn.cute.interface")
    prove_kernel(kernel, Heads(gpu, torch.bfloat16, 16, 8, 128, 128, None), attention._together)
    caches = [interface._flash_attn_fwd.compile_cache, interface._flash_attn_bwd.compile_cache]
    compiled = [len(cache.cache) for cache in caches]
    for tokens in (4096, 5001, 16_384):
        states = [
            torch.randn(count, tokens, 128, device=gpu, dtype=torch.bfloat16).transpose(0, 1) for count in (16, 8, 8)
        ]
        query, key, value = (state.requires_grad_() for state in states)
        sample_attention(query, key, value, 0.1, "flash-attn-4")[0].sum().backward()
    assert [len(cache.cache) for cache in caches] == compiled
