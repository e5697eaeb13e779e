"""A layer that is computed again has its attention computed once, by whichever kernel, with the same gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen3Config

from counterpoint.trainer.model import attention
from counterpoint.trainer.model.context import ContextGroup, Stretch
from counterpoint.trainer.model.kernels import kept as kept_attention
from counterpoint.trainer.model.kernels import packages, row
from counterpoint.trainer.model.kernels.kept import KERNELS, Kept, computed_once, keeping
from counterpoint.trainer.model.kernels.proof import Heads
from counterpoint.trainer.model.load import load_model
from counterpoint.trainer.model.recompute import checkpoint_layers
from counterpoint.trainer.model.shared_prompts import Family
from tests.support.live_bytes import LiveBytes
from tests.trainer.conftest import LAYERS
from tests.trainer.model.kernels.test_row import PACKAGE, Fake, together

LEAST, LONG, SHORT = 144, 168, 72

WAYS: dict[str, tuple[dict[str, Any], int, int]] = {
    "samples": ({"sample_lengths": [LONG, SHORT, LONG + 4]}, 4, 6),
    "stretch": ({"sample_lengths": [2 * LONG + 3 * SHORT]}, 1, 2),
    "families": (
        {
            "sample_lengths": [SHORT, SHORT, LONG],
            "families": (Family(SHORT - 8, (8, 8)), Family(LONG, (0,)), Family(LONG, (4,))),
        },
        4,
        6,
    ),
}
"""Arguments of a layer, and calls of kernels in its forward and backward passes with results that are kept and without."""


@pytest.fixture(autouse=True)
def _few_tokens_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_attention, "LEAST_TOKENS", LEAST)


class _Calls(TorchDispatchMode):
    """Counts calls of kernels in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in KERNELS
        return func(*args, **(kwargs or {}))


def gradients(model: Any, arguments: dict[str, Any], calls: _Calls, device: str = "cpu") -> list[Tensor]:
    """Those of the weights, and of what the first layer gets, after a backward pass in another thread, as a GPU's."""
    tokens = sum(arguments["sample_lengths"])
    if "families" in arguments:
        tokens = sum(family.tokens for family in arguments["families"])
    if "stretch" in arguments:
        tokens = arguments["stretch"].length
    random = torch.Generator().manual_seed(0)
    dtype = model.lm_head.weight.dtype
    start = torch.randn(1, tokens, model.config.hidden_size, generator=random).to(device, dtype).requires_grad_()
    positions = model.model.rotary_emb(start, torch.arange(tokens, device=device)[None])
    hidden = start
    with calls:
        for layer in model.model.layers:
            hidden = layer(hidden, position_embeddings=positions, attention_mask=None, **arguments)

    def backward() -> None:
        with calls:
            hidden.square().sum().backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join(60)
    return [start.grad, *(weight.grad for weight in model.model.layers.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_call_is_made_once(dense_directory: Path, way: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of long samples. Gradients are the same bits as those with all calls made again, and without checkpointing."""

    def whole(_: Stretch, states: Tensor) -> Tensor:
        return torch.cat([states.flip(2), states], 2)

    def bias(queries: int, keys: int) -> Any:
        with _disable_current_modes():  # torch makes none in those of a count
            return causal_lower_right(queries, keys)

    monkeypatch.setattr(Stretch, "whole", whole)
    monkeypatch.setattr(attention, "causal_lower_right", bias)
    arguments, once, twice = WAYS[way]
    if way == "stretch":
        shared = Stretch(ContextGroup(cast("Any", None), 1, 2), sum(arguments["sample_lengths"]))
        arguments = arguments | {"stretch": shared}
    found = []
    for least, ways, expected in (
        (LEAST, [LAYERS], once),
        (2**20, [LAYERS], twice),
        (1, [None], twice),
        (1, [], twice // 2),
    ):
        monkeypatch.setattr(kept_attention, "LEAST_TOKENS", least)
        model = load_model(dense_directory, dtype, torch.device("cpu"))
        for layers in ways:
            checkpoint_layers(model, None, layers)
        found.append(gradients(model, arguments, calls := _Calls()))
        assert calls.count == expected * LAYERS
    assert all(float(gradient.abs().max()) > 0 for gradient in found[0])
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=0, atol=0)


def test_the_kernel_of_a_whole_row_is_called_once(dense_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's, by its shapes alone."""
    monkeypatch.setattr(attention, "_has_packed_kernel", lambda _: True)
    monkeypatch.setattr(row, "_choose", lambda *_: None)
    monkeypatch.setattr(row, "_chosen", {})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            Qwen3Config.from_pretrained(dense_directory), attn_implementation=attention.NAME
        ).eval()
    checkpoint_layers(model, None, LAYERS)
    found = gradients(model, {"sample_lengths": [LONG, SHORT]}, calls := _Calls(), "meta")
    assert calls.count == LAYERS
    assert all(gradient is not None for gradient in found)


def test_the_kernel_of_a_package_is_called_once(dense_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is proven in the first layer's forward pass, of which its calls are no part."""
    monkeypatch.setattr(attention, "_has_packed_kernel", lambda _: True)
    monkeypatch.setattr(row, "LONG_SAMPLE", LONG)
    found = []
    for least, expected in ((LEAST, 2), (2**20, 4)):
        kernel: Any = Fake()
        monkeypatch.setitem(packages.KERNELS, PACKAGE, kernel)
        monkeypatch.setattr(kept_attention, "LEAST_TOKENS", least)
        monkeypatch.setattr(row, "_chosen", {})

        def choose(heads: Heads, _: row.Together, kernel: Any = kernel) -> str:
            row.prove_kernel(kernel, heads, together)
            kernel.lengths.clear()
            return PACKAGE

        monkeypatch.setattr(row, "_choose", choose)
        model = load_model(dense_directory, "float32", torch.device("cpu"))
        checkpoint_layers(model, None, LAYERS)
        found.append(gradients(model, {"sample_lengths": [LONG, LONG + 4]}, _Calls()))
        assert kernel.lengths == [LONG, LONG + 4] * (expected // 2) * LAYERS
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


def test_a_row_of_many_parts_is_computed_again_whatever_was_computed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's first pass may find boundaries of samples that another row has made; then they are there again."""

    def varlen(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, *_: Any, **given: Any) -> Tensor:
        return together(query, key, value, boundaries.diff().tolist(), given["scale"])

    monkeypatch.setattr(attention, "varlen_attn", varlen)
    monkeypatch.setitem(packages.KERNELS, PACKAGE, cast("Any", Fake()))
    attention._boundaries.cache_clear()

    def forward(states: Tensor, lengths: list[int]) -> Tensor:
        heads = states.view(-1, 1, 16)
        given = heads, heads, heads, lengths, 0.3, attention._together, PACKAGE, LONG
        return computed_once(row._attend, LONG, *given).view_as(states)

    for lengths in ([1, LONG], [each for short in range(1, 9) for each in (short, LONG)]):
        output = start = torch.randn(sum(lengths), 16, requires_grad=True)
        for kept in (Kept(), Kept()):
            contexts = keeping(kept, again=False), keeping(kept, again=True)
            output = checkpoint(forward, output, lengths, use_reentrant=False, context_fn=partial(tuple, contexts))
        output.sum().backward()
        assert start.grad is not None


def test_what_is_kept_lives_until_the_backward_pass(dense_directory: Path) -> None:
    """A layer keeps for each token an input, and attention with its log-sum-exp; of a short sample only the input."""
    model = load_model(dense_directory, "float32", torch.device("cpu"))
    checkpoint_layers(model, None, LAYERS)
    config = model.config
    lives = []
    for length in (LEAST - 1, LEAST):
        with torch.no_grad():
            positions = model.model.rotary_emb(torch.empty(1), torch.arange(length)[None])
        hidden = torch.randn(1, length, config.hidden_size, requires_grad=True)
        with LiveBytes([*model.parameters(), *model.buffers(), hidden, *positions]) as live:
            output: Any = hidden
            for layer in model.model.layers:
                output = layer(output, position_embeddings=positions, attention_mask=None, sample_lengths=[length])
            lives.append(live.now / (4 * length * LAYERS))
            output.sum().backward()
            del output
            model.zero_grad()
            hidden.grad = None
            assert live.now < 4096, "nothing is kept afterwards"
    assert lives[0] == pytest.approx(config.hidden_size, abs=1)
    kept = config.num_attention_heads * (config.head_dim + 1)
    assert lives[1] == pytest.approx(config.hidden_size + kept, abs=1)


def test_a_result_that_the_layer_changes_is_refused() -> None:
    """It would be another one when the layer is computed again."""
    states = torch.randn(1, 2, LONG, 8, requires_grad=True)
    kept: Kept = Kept()

    def forward(states: Tensor) -> Tensor:
        return computed_once(scaled_dot_product_attention, LONG, states, states, states).mul_(2) @ torch.eye(8)

    output = checkpoint(
        forward,
        states,
        use_reentrant=False,
        context_fn=lambda: (keeping(kept, again=False), keeping(kept, again=True)),
    )
    with pytest.raises(RuntimeError, match="has been mutated"):
        output.sum().backward()


def test_a_layer_without_gradients_keeps_nothing(dense_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []
    monkeypatch.setattr(kept_attention, "create_selective_checkpoint_contexts", made.append)
    model = load_model(dense_directory, "float32", torch.device("cpu"))
    checkpoint_layers(model, None, LAYERS)
    tokens = torch.zeros(1, LONG, dtype=torch.int64)
    with torch.no_grad():
        model(tokens, position_ids=torch.arange(LONG)[None], sample_lengths=[LONG])
    assert not made
