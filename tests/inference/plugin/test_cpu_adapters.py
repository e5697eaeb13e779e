"""Adapters on a CPU: products by slot agree with vLLM's own class, and a row without an adapter gets nothing."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from counterpoint.inference.plugin import platform_plugin

pytestmark = pytest.mark.slow  # vLLM takes seconds to import

SLOTS = 4
IDS = [11, None, 13, 14]
"""The adapters in the slots; the mapping names them."""


@pytest.fixture(scope="module", autouse=True)
def _vllm_compiles_nothing() -> None:
    """Imports vLLM as its server does: without functions that torch compiles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        import vllm.lora.layers
        import vllm.lora.punica_wrapper.punica_cpu  # noqa: F401


def _wrapper(own: bool, per_request: Sequence[tuple[int, int]], is_prefill: bool) -> Any:
    """Our wrapper or vLLM's, for requests of (adapter, tokens)."""
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from counterpoint.inference.plugin.cpu.adapters import GroupedPunicaWrapper

    kind = GroupedPunicaWrapper if own else PunicaWrapperCPU
    wrapper = kind(256, 64, device="cpu")
    by_token = tuple(adapter for adapter, tokens in per_request for _ in range(tokens))
    wrapper.update_metadata(
        LoRAMapping(by_token, tuple(adapter for adapter, _ in per_request), is_prefill=is_prefill), IDS, SLOTS, 100
    )
    return wrapper


def _random(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def _requests(generator: torch.Generator, adapters: Sequence[int], is_prefill: bool) -> list[tuple[int, int]]:
    picked = torch.randint(len(adapters), (9,), generator=generator).tolist()
    lengths = torch.randint(1, 9, (9,), generator=generator).tolist() if is_prefill else [1] * 9
    return [(adapters[index], length) for index, length in zip(picked, lengths, strict=True)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("adapters", [(11,), (13, 11), (11, 13, 14)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_those_of_vllms_own_class(
    seed: int, is_prefill: bool, adapters: Sequence[int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    requests = _requests(generator, adapters, is_prefill)
    tokens, rank = sum(length for _, length in requests), 2 ** (1 + seed % 4)
    width, outs = 8 * (1 + seed), [16 * (1 + seed % 3), 8, 8]
    x, y = _random(generator, tokens, width, dtype=dtype), _random(generator, tokens, sum(outs), dtype=dtype)
    a = tuple(_random(generator, SLOTS, 1, rank, width, dtype=dtype) for _ in outs)
    b = tuple(_random(generator, SLOTS, 1, out, rank, dtype=dtype) for out in outs)
    logits, hidden = _random(generator, len(requests), 40, dtype=dtype), x[: len(requests)]
    head_b = _random(generator, SLOTS, 1, 32, rank, dtype=dtype)  # of a vocabulary that the model pads
    embedded_b = _random(generator, SLOTS, sum(outs), width, dtype=dtype)
    results = []
    for own in (False, True):
        wrapper = _wrapper(own, requests, is_prefill)
        linear, of_logits, embedded = y.clone(), logits.clone(), y.clone()
        wrapper.add_lora_linear(linear, x, a, b, 0.5, tuple(outs))
        wrapper.add_lora_logits(of_logits, hidden, a[0], head_b, 2.0)
        wrapper.add_lora_embedding(embedded, x, embedded_b)
        results.append((linear, of_logits, embedded))
    relative = 1e-5 if dtype is torch.float32 else 2e-2  # bfloat16 has 8 bits, and sums up in another order
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=relative, atol=relative * 8)


@pytest.mark.parametrize("is_prefill", [True, False])
@pytest.mark.parametrize("adapters", [(0,), (0, 11), (14, 0)])
def test_a_row_without_an_adapter_gets_nothing_and_the_others_theirs(is_prefill: bool, adapters: Sequence[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    requests = _requests(generator, adapters, is_prefill)
    tokens = sum(length for _, length in requests)
    x, y = _random(generator, tokens, 16), _random(generator, tokens, 24)
    a, b = _random(generator, SLOTS, 1, 4, 16), _random(generator, SLOTS, 1, 24, 4)
    wrapper = _wrapper(True, requests, is_prefill)
    result, logits = y.clone(), y[: len(requests)].clone()
    wrapper.add_lora_linear(result, x, (a,), (b,), 0.5, (24,))
    wrapper.add_lora_logits(logits, x[: len(requests)], a, b, 0.5)
    of_rows = [adapter for adapter, length in requests for _ in range(length)]
    for computed, owners in ((result, of_rows), (logits, [adapter for adapter, _ in requests])):
        for row, adapter in enumerate(owners):
            added = 0.5 * x[row] @ a[IDS.index(adapter), 0].T @ b[IDS.index(adapter), 0].T if adapter else 0
            torch.testing.assert_close(computed[row], y[row] + added, rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_those_of_the_batch_are_refused() -> None:
    wrapper = _wrapper(True, [(11, 1), (13, 1)], is_prefill=False)
    with pytest.raises(ValueError, match="3 rows, and adapters of 2"):
        wrapper.add_lora_logits(
            torch.zeros(3, 8), torch.zeros(3, 4), torch.zeros(SLOTS, 1, 2, 4), torch.zeros(SLOTS, 1, 8, 2), 1.0
        )


def test_the_platform_is_vllms_own_in_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from counterpoint.inference.plugin.cpu.adapters import GroupedPunicaWrapper

    monkeypatch.setenv("VLLM_PLUGINS", "counterpoint")
    name = platform_plugin()
    assert name is not None, "vLLM's CPU build is installed"
    platform = resolve_obj_by_qualname(name)
    assert issubclass(platform, type(current_platform))
    assert resolve_obj_by_qualname(platform.get_punica_wrapper()) is GroupedPunicaWrapper
    assert not platform().is_out_of_tree()
    assert platform().is_cpu()


def test_vllm_takes_the_platform_that_the_project_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import resolve_current_platform_cls_qualname

    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    group = "vllm.platform_plugins"
    declared = [EntryPoint(name, value, group) for name, value in project["entry-points"][group].items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: declared if group == declared[0].group else [])
    monkeypatch.setenv("VLLM_PLUGINS", "counterpoint")
    assert (ours := platform_plugin()) is not None
    assert resolve_current_platform_cls_qualname() == ours
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert resolve_current_platform_cls_qualname() != ours
    monkeypatch.delenv("VLLM_PLUGINS")  # somebody's own vLLM, which calls whatever is installed
    assert resolve_current_platform_cls_qualname() != ours
