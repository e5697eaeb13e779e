"""A package's kernel computes long samples only where it is proven; one that is wrong or fails is left out with a warning."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import _fa3

from counterpoint.trainer.model import attention
from counterpoint.trainer.model.kernels import packages
from counterpoint.trainer.model.kernels import row as kernels
from counterpoint.trainer.model.kernels.proof import Heads
from counterpoint.trainer.model.load import load_model
from counterpoint.trainer.model.packing_proof import can_pack, prove_packing

PACKAGE = "flash-attn-4"
LENGTHS = [3, 40, 1, 2, 33, 64, 5]
LONG = 32


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """`[heads, T, T]`, masked."""
    scores = query.transpose(0, 1) @ _grouped(key, query.shape[1]).transpose(0, 1).mT * scale
    return scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)


def _grouped(tensor: Tensor, heads: int) -> Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], 1)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one sample, written out in float32, and rounded: what a kernel does."""
    scores = _scores(query.float(), key.float(), scale)
    found = scores.softmax(-1) @ _grouped(value.float(), query.shape[1]).transpose(0, 1)
    return found.transpose(0, 1).to(query.dtype), scores.logsumexp(-1)


def together(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scaling: float | None) -> Tensor:
    """Stands in for torch's kernel."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts = (state.split(list(lengths)) for state in (query, key, value))
    return torch.cat([attend(q, k, v, scale)[0] for q, k, v in zip(*parts, strict=True)])


class Fake:
    """A package's kernel on the CPU, with a fault."""

    name = "a kernel"
    package = PACKAGE
    majors = (9,)

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.lengths: list[int] = []
        self.backwards = 0

    def load(self) -> None:
        if self.fault == "import":
            raise ImportError("libcute.so: cannot open shared object file")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        self.lengths.append(query.shape[1])
        if self.fault == "compiler":
            raise RuntimeError("DSLRuntimeError: cannot be lowered")
        if self.fault == "scale":
            scale *= 1.1
        found, sums = attend(query[0], key[0], value[0], scale)
        if self.fault == "mask":  # each token sees the next one
            shifted = attend(query[0], key[0].roll(-1, 0), value[0].roll(-1, 0), scale)[0]
            found = torch.cat((shifted[:-1], found[-1:]))
        if self.fault == "past the end":  # as a tile that is read across the border of a sample
            followed = value.storage_offset() + value.numel() < value.untyped_storage().nbytes() // value.element_size()
            sizes = (value.shape[1] + followed, *value.shape[2:])
            found = found + value.as_strided(sizes, value.stride()[1:])[-1, 0] * 0
        return found[None], sums[None]

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, sums: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.backwards += 1
        with torch.enable_grad():
            states = [state[0].detach().requires_grad_() for state in (query, key, value)]
            found, _ = attend(states[0], states[1], states[2], scale)
        queries, keys, values = (each[None] for each in torch.autograd.grad(found, states, gradient[0]))
        if self.fault == "gradient":
            keys = keys * 0.9
        return queries, keys, values


@pytest.fixture
def on_card(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fake]:
    """Returns what sets up a Hopper card with a package whose kernel has a fault."""
    monkeypatch.setattr(kernels, "_chosen", {})
    monkeypatch.setattr(kernels, "LONG_SAMPLE", LONG)
    monkeypatch.setattr(kernels, "_LONG_PROOF_LENGTHS", (40, 36, 57))
    monkeypatch.setattr(kernels, "_PROOF_LENGTHS", (7, 30, 1, 13))

    def set_up(fault: str = "", capability: tuple[int, int] = (9, 0), installed: bool = True) -> Fake:
        kernel = Fake(fault)

        def version(package: str) -> str:
            if package != PACKAGE or not installed:
                raise PackageNotFoundError(package)
            return "4.0.0"

        monkeypatch.setitem(packages.KERNELS, PACKAGE, kernel)
        monkeypatch.setattr(kernels, "version", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        return kernel

    return set_up


def _proven(*states: Tensor, own: kernels.Together = together) -> Tensor:
    return kernels.packed_attention(states[0], states[1], states[2], LENGTHS, 0.3, own)


def _own(*states: Tensor) -> Tensor:
    return together(states[0], states[1], states[2], LENGTHS, 0.3)


def _row(computed: Callable[..., Tensor]) -> list[Tensor]:
    """Computes a row; returns its values and the gradients of its queries, keys and values."""
    generator = torch.Generator().manual_seed(1)
    states = [
        torch.randn(sum(LENGTHS), heads, 16, generator=generator).bfloat16().requires_grad_() for heads in (6, 2, 2)
    ]
    found = computed(*states)
    gradient = torch.randn(found.shape, generator=generator).bfloat16()
    return [found, *torch.autograd.grad(found, states, gradient)]


def test_a_proven_kernel_computes_long_samples_and_torchs_the_others(on_card: Callable[..., Fake]) -> None:
    kernel = on_card()
    short: list[list[int]] = []

    def own(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scaling: float | None) -> Tensor:
        short.append(list(lengths))
        return together(query, key, value, lengths, scaling)

    with torch.no_grad():  # as when a model is loaded
        query, key = (torch.zeros(4, heads, 16, dtype=torch.bfloat16) for heads in (6, 2))
        kernels.packed_attention(query, key, key, [4], 0.3, own)
    assert kernel.backwards == len(kernel.lengths) == 3
    kernel.lengths.clear()
    short.clear()
    found = _row(partial(_proven, own=own))
    assert kernel.lengths == [40, 33, 64]
    assert short == [[3], [1, 2], [5]]
    assert kernel.backwards == 6
    for ours, theirs in zip(found, _row(_own), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("fault", ["import", "compiler", "scale", "mask", "gradient", "past the end"])
def test_a_kernel_with_a_fault_is_left_out_with_a_warning(
    fault: str, on_card: Callable[..., Fake], caplog: pytest.LogCaptureFixture
) -> None:
    kernel = on_card(fault)
    found = _row(_proven)
    tried = len(kernel.lengths)
    for ours, theirs in zip(found, _row(_own), strict=True):
        assert torch.equal(ours, theirs)
    [warning] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert PACKAGE in warning.getMessage()
    _row(_proven)
    assert len(kernel.lengths) == tried  # it is tried once


@pytest.mark.parametrize(("capability", "installed", "warnings"), [((8, 0), True, 1), ((9, 0), False, 0)])
def test_a_kernel_for_other_cards_or_that_is_not_there_is_not_tried(
    capability: tuple[int, int],
    installed: bool,
    warnings: int,
    on_card: Callable[..., Fake],
    caplog: pytest.LogCaptureFixture,
) -> None:
    kernel = on_card(capability=capability, installed=installed)
    _row(_proven)
    assert kernel.lengths == []
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) == warnings


@pytest.mark.parametrize("fault", ["values", "gradients"])
def test_torchs_own_kernel_is_refused_if_it_is_wrong(fault: str, on_card: Callable[..., Fake]) -> None:
    on_card()

    def wrong(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scaling: float | None) -> Tensor:
        found = together(query, key, value, lengths, scaling)
        if fault == "values":  # one token of the sample before is seen
            return together(query, key, value, [lengths[0] - 1, lengths[1] + 1, *lengths[2:]], scaling)
        return found.detach() + (found - found.detach()) * 1.1

    with pytest.raises(ValueError, match="FlashAttention 2 is wrong"):
        _row(partial(_proven, own=wrong))


def test_a_kernel_that_fails_in_the_card_ends_the_load(
    on_card: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA context is lost then, and every later call fails."""
    kernel = on_card()

    def lost(*_: object) -> tuple[Tensor, Tensor]:
        raise torch.AcceleratorError("an illegal memory access was encountered", 700)

    monkeypatch.setattr(kernel, "forward", lost)
    with pytest.raises(torch.AcceleratorError):
        _row(_proven)


@pytest.mark.slow
def test_a_loaded_model_has_its_kernel_proven_before_its_first_row(
    on_card: Callable[..., Fake], dense_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = on_card()
    monkeypatch.setattr(attention, "_has_packed_kernel", lambda query: query.dtype == torch.bfloat16)
    monkeypatch.setattr(attention, "_together", together)
    model = load_model(dense_directory, "bfloat16", torch.device("cpu"))
    prove_packing(model)
    assert can_pack(model)
    assert kernel.backwards == len(kernel.lengths) == 3
    assert list(kernels._chosen.values()) == [PACKAGE]


class Computed:
    """The functions of a package, which take their arguments by the names or places of their own, on the CPU."""

    kernel = Fake()

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, attended: Tensor, sums: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        expected = self.kernel.forward(query, key, value, scale)
        torch.testing.assert_close((attended, sums), expected, equal_nan=True)
        return self.kernel.backward(gradient, query, key, value, attended, sums, scale)

    def forward_4(
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, return_lse: bool
    ) -> tuple[Tensor | None, ...]:
        assert causal
        assert return_lse
        return (*self.kernel.forward(q, k, v, softmax_scale), None, None, None)  # two until 4.0.0b18

    def backward_4(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, *,
        softmax_scale: float, causal: bool, deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert causal
        assert not deterministic
        return self.backward(dout, q, k, v, out, lse, softmax_scale)

    def forward_3(self, *given: Any) -> tuple[Tensor | None, ...]:
        (query, key, value), (longest, _), scale, causal = given[:3], given[12:14], given[23], given[24]
        assert causal
        assert longest == query.shape[1]
        assert set(given[3:12]) == {None}
        return (*self.kernel.forward(query, key, value, scale), None, None)

    def backward_3(self, *given: Any) -> None:
        gradient, query, key, value, attended, sums, *found = given[:9]
        assert given[9:13] == (None,) * 4
        assert given[13:15] == (query.shape[1],) * 2
        assert given[16:21] == (True, -1, -1, 0.0, False)
        computed = self.backward(gradient, query, key, value, attended, sums, given[15])
        for place, result in zip(found, computed, strict=True):
            place.copy_(result)


@pytest.mark.parametrize("package", packages.KERNELS)
def test_packages_are_called_as_they_expect(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Version 3 by torch's functions. What version 4 compiles is kept where torch keeps its graphs."""
    monkeypatch.setattr(kernels, "_LONG_PROOF_LENGTHS", (40, 36, 57))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for name in ("CACHE_DIR", "CACHE_ENABLED"):  # set, so that they are taken back
        monkeypatch.setenv(f"FLASH_ATTENTION_CUTE_DSL_{name}", "")
        monkeypatch.delenv(f"FLASH_ATTENTION_CUTE_DSL_{name}")
    computed = Computed()
    module = SimpleNamespace(_flash_attn_fwd=computed.forward_4, _flash_attn_bwd=computed.backward_4)
    monkeypatch.setattr(importlib, "import_module", {"flash_attn.cute.interface": module}.__getitem__)
    monkeypatch.setattr(_fa3, "_fa3_import_module", lambda path: {"flash_attn_interface": None}[path])
    monkeypatch.setattr(_fa3, "_FA3_CUDA_FWD", computed.forward_3)
    monkeypatch.setattr(_fa3, "_FA3_CUDA_BWD", computed.backward_3)
    heads = Heads(torch.device("cpu"), torch.bfloat16, 6, 2, 16, 16, 0.3)
    kernels.prove_kernel(packages.KERNELS[package], heads, together)
    if package == "flash-attn-4":
        assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] == str(tmp_path / "flash_attention")
        assert os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
