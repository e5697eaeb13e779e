"""The chunked output layer against a plain float64 softmax, and against the models' own logits where they change them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    PreTrainedModel,
)

from counterpoint.trainer.model import chunks, head
from counterpoint.trainer.model.chunks import chunked_outputs
from counterpoint.trainer.model.head import TokenOutputs, prove_head, token_outputs
from counterpoint.trainer.model.load import load_model
from counterpoint.trainer.model.packing_proof import prove_packing
from tests.trainer.conftest import VOCABULARY

CPU = torch.device("cpu")
TOKENS = 10
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, divisor: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    values, entropies = [], []
    for state, target, temperature in zip(hidden, targets, divisor, strict=True):
        logits = (weight @ state + (0 if bias is None else bias)) / temperature
        probabilities = logits.exp() / logits.exp().sum()
        values.append(probabilities[target].log())
        entropies.append(-(probabilities * probabilities.log()).sum())
    return torch.stack(values), torch.stack(entropies)


def inputs(dtype: torch.dtype, bias: bool) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return [
        random(TOKENS, 6).requires_grad_(),
        random(17, 6).requires_grad_(),
        random(17).requires_grad_() if bias else None,
        torch.arange(TOKENS) * 7 % 17,
        torch.linspace(0.5, 2.0, TOKENS, dtype=torch.float64).to(dtype),
    ]


@pytest.mark.parametrize("chunk_bytes", [4, 4 * 17 * 3, 2**20], ids=["one logit", "some", "all at once"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_agrees_with_the_definition_in_float64(
    chunk_bytes: int, bias: bool, dtype: torch.dtype, entropy_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    ours, exact = inputs(dtype, bias), inputs(torch.float64, bias)
    values_P, entropies_P = chunked_outputs(*ours, entropy_gradient=entropy_gradient)
    expected = reference(*exact)
    tolerance = {"rtol": 1e-6, "atol": 3e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close((values_P.double(), entropies_P.double()), expected, **tolerance)
    assert entropies_P.requires_grad == entropy_gradient
    weights_P = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    own = (values_P * weights_P).sum()
    wanted = (expected[0] * weights_P).sum()
    if entropy_gradient:
        own, wanted = own + (entropies_P * weights_P.flip(0)).sum(), wanted + (expected[1] * weights_P.flip(0)).sum()
    own.backward()
    wanted.backward()
    for mine, reference_input in zip(ours[:3], exact[:3], strict=True):
        if mine is not None and reference_input is not None:
            assert mine.grad.dtype == dtype
            torch.testing.assert_close(mine.grad.double(), reference_input.grad, **tolerance)


@pytest.mark.parametrize(
    ("vocabulary", "memory", "tokens"),
    [
        (151_936, None, 220),
        (151_936, 16 * 2**30, 220),
        (151_936, 24 * 2**30, 331),
        (151_936, 80 * 2**30, 1024),
        (151_936, 140 * 2**30, 1024),
        (32_000, 80 * 2**30, 1048),
        (1_000_000, 80 * 2**30, 167),
    ],
)
def test_a_gpu_with_the_memory_for_it_has_chunks_that_keep_it_busy(
    vocabulary: int, memory: int | None, tokens: int
) -> None:
    found = chunks.chunk_bytes(vocabulary, memory)
    assert found // (4 * vocabulary) == tokens
    assert found == chunks.CHUNK_BYTES or (memory is not None and chunks.MEMORY_SHARE * found <= memory)


def test_the_parts_of_a_chunk_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As products want it, whatever the number of tokens; and the results are those of whole logits."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 1000)
    sizes, every = list[int](), chunks._slices

    def noted(length: int, size: int) -> Iterator[slice]:
        sizes.append(size)
        return every(length, size)

    monkeypatch.setattr(chunks, "_slices", noted)
    hidden_PH, weight_VH = (torch.randn(rows, 6, dtype=torch.float64, requires_grad=True) for rows in (13, 300))
    targets_P = torch.arange(13)
    values_P, _ = chunked_outputs(hidden_PH, weight_VH, None, targets_P, None)
    found = torch.autograd.grad(values_P.sum(), (hidden_PH, weight_VH))
    expected_P = torch.log_softmax(hidden_PH @ weight_VH.T, -1)[range(13), targets_P]
    torch.testing.assert_close(values_P, expected_P, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, torch.autograd.grad(expected_P.sum(), (hidden_PH, weight_VH)), rtol=0, atol=1e-12)
    assert sizes == [3, 13, 64]


def test_bfloat16_gradients_are_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks are added up in float32: the error stays that of one rounding, whatever their number."""
    exact = inputs(torch.float64, True)
    ours = [each.detach().bfloat16().requires_grad_() if each is not None else None for each in exact[:3]]
    exact[:3] = [each.detach().double().requires_grad_() if each is not None else None for each in ours]
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 17)
    chunked_outputs(*ours, *inputs(torch.float32, True)[3:])[0].sum().backward()
    reference(*exact)[0].sum().backward()
    for mine, wanted in zip(ours, exact[:3], strict=True):
        assert mine is not None
        assert wanted is not None
        assert mine.grad is not None
        assert mine.grad.dtype == torch.bfloat16
        torch.testing.assert_close(mine.grad.double(), wanted.grad, rtol=2e-2, atol=4e-2)


def test_a_weights_gradient_of_many_slices_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of one sign, so that a sum in bfloat16 would stand still; a layer without a bias, as most are."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 17 * 4)
    generator = torch.Generator().manual_seed(0)
    hidden = (1 + 0.1 * torch.randn(4000, 6, generator=generator)).bfloat16()
    weight = (0.1 * torch.randn(17, 6, generator=generator)).bfloat16().requires_grad_()
    exact = weight.detach().double().requires_grad_()
    targets_P = torch.zeros(len(hidden), dtype=torch.int64)
    chunked_outputs(hidden, weight, None, targets_P, None)[0].sum().backward()
    torch.log_softmax(hidden.double() @ exact.T, -1)[:, 0].sum().backward()
    assert weight.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-2, atol=0)


@pytest.mark.parametrize(("dtype", "whole"), [(torch.float32, False), (torch.float64, False), (torch.float32, True)])
def test_a_token_that_cannot_be_drawn_adds_nothing_to_the_entropy(dtype: torch.dtype, whole: bool) -> None:
    """A logit of -inf, against the definition without that token, in float64."""
    hidden, weight, bias, targets, divisor = inputs(dtype, True)
    exact = inputs(torch.float64, True)
    assert hidden is not None
    assert weight is not None
    assert bias is not None
    assert targets is not None
    assert divisor is not None
    never, others = 5, torch.arange(17) != 5
    targets[targets == never] = never + 1
    with torch.no_grad():
        bias[never] = -torch.inf
    values_P, entropies_P = (
        head._whole_outputs(hidden @ weight.T + bias, targets, divisor, True)
        if whole
        else chunked_outputs(hidden, weight, bias, targets, divisor, entropy_gradient=True)
    )
    assert exact[1] is not None
    assert exact[2] is not None
    drawn = targets - (targets > never).long()
    expected = reference(exact[0], exact[1][others], exact[2][others], drawn, exact[4])
    tolerance = {"rtol": 1e-6, "atol": 3e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close((values_P.double(), entropies_P.double()), expected, **tolerance)
    torch.autograd.backward([values_P.sum() + 2 * entropies_P.sum(), expected[0].sum() + 2 * expected[1].sum()])
    for mine, wanted in zip((hidden, weight, bias), exact[:3], strict=True):
        assert mine.grad is not None
        assert wanted is not None
        torch.testing.assert_close(mine.grad.double(), wanted.grad, **tolerance)


def test_no_token_at_all() -> None:
    hidden = torch.zeros(0, 6, requires_grad=True)
    weight = torch.randn(17, 6, requires_grad=True)
    values_P, entropies_P = chunked_outputs(hidden, weight, None, torch.zeros(0, dtype=torch.int64), torch.ones(0))
    (values_P.sum() + entropies_P.sum()).backward()
    assert (values_P.shape, hidden.grad.shape, float(weight.grad.abs().sum())) == ((0,), (0, 6), 0.0)


def outputs_of(model: nn.Module, temperature: float | Tensor = 0.7, *, entropy_gradient: bool = False) -> TokenOutputs:
    tokens_T = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    positions_T = torch.arange(TOKENS)
    return token_outputs(
        model, tokens_T, positions_T, [TOKENS], positions_T[:-1], tokens_T[1:], temperature, entropy_gradient=entropy_gradient
    )  # fmt: skip


def compare(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunked against whole logits: values, and gradients of all weights."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * VOCABULARY * 3)
    results = []
    for scale in (model.logits_scale, None):
        model.logits_scale = scale
        model.zero_grad()
        outputs = outputs_of(model, entropy_gradient=True)
        assert outputs.hidden_PH is not None
        outputs.log_probabilities_P[3:].sum().add(outputs.entropies_P[:5].sum()).add(outputs.hidden_PH.sum()).backward()
        results.append((outputs, {name: parameter.grad for name, parameter in model.named_parameters()}))
    (ours, own), (whole, wanted) = results
    for name in TokenOutputs.__slots__:
        torch.testing.assert_close(getattr(ours, name), getattr(whole, name), rtol=0, atol=2e-6)
    torch.testing.assert_close(own, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_plain_head_is_chunked(dense_directory: Path, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(dense_directory, "float32", CPU)
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 1.1)
    prove_head(model)
    assert model.logits_scale == 1
    compare(model, monkeypatch)


@pytest.mark.parametrize(
    ("made", "scale"),
    [
        (lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=4.0)), 0.25),
        (lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.0625)), 0.0625),
    ],
    ids=["granite", "cohere"],
)
def test_scaled_logits_are_chunked(
    made: Callable[[], PreTrainedModel], scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    made().save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", CPU)
    prove_packing(model)  # compares with the stock model's logits
    assert model.logits_scale == pytest.approx(scale)
    compare(model, monkeypatch)


def test_soft_capped_logits_are_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(**SHAPE, head_dim=8, final_logit_softcapping=30.0, attn_logit_softcapping=None)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, "float32", CPU)
    with caplog.at_level(logging.WARNING):
        prove_packing(model)
    assert model.logits_scale is None
    assert "whole logits (tokens times vocabulary): it maps logits of" in caplog.text


def test_a_head_of_another_kind_is_whole(dense_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Doubling(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base

        def forward(self, hidden: Tensor) -> Tensor:
            return self.base(hidden) * 2

    model = load_model(dense_directory, "float32", CPU)
    plain = outputs_of(model, temperature=1.0)
    model.lm_head = Doubling(model.lm_head)
    with caplog.at_level(logging.WARNING):
        prove_head(model)
    assert "its output layer is a Doubling" in caplog.text
    torch.testing.assert_close(outputs_of(model, temperature=2.0).log_probabilities_P, plain.log_probabilities_P)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "bend", [lambda output: output.roll(1, -1), lambda output: output + 0.1 * (torch.arange(output.shape[-1]) % 2)]
)
def test_a_head_that_a_hook_changes_is_found_out(
    dense_directory: Path, caplog: pytest.LogCaptureFixture, bend: Callable[[Tensor], Tensor], dtype: str
) -> None:
    """A hook that bends the logits sees our results instead; the comparison with whole logits shows it."""
    model = load_model(dense_directory, dtype, CPU)
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: bend(output))
    with caplog.at_level(logging.WARNING):
        prove_head(model)
    assert model.logits_scale is None
    assert "differ by" in caplog.text
