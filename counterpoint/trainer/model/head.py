"""Log-probabilities and entropies of chosen tokens by the output layer, without a tensor of tokens times vocabulary.

The logits of a row are its largest tensor: 8,192 tokens of a vocabulary of 152,000 take 5 GB in float32, and their gradient as
much. So the output layer is computed for a chunk of the tokens at a time, in the forward and again in the backward pass, and
only what is left of each token is kept. `counterpoint/trainer/model/load.py` calls it with the model.

The chunks are computed inside the output layer's own call, in place of its product, so hooks on it (such as FSDP's) run as
usual, and what the model does with the logits is applied to their results instead. That is right where it multiplies them by a
number (Granite, Cohere) and wrong for anything else, such as a soft cap. `prove_head` finds out by computation when a model is
loaded; a model whose head is anything else gets whole logits. Suffixes: `P` tokens, `H` hidden size, `V` vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from counterpoint.trainer.faults import is_fatal
from counterpoint.trainer.model.chunks import LEAST_LOGARITHM, ChunkArithmetic, chunked_outputs
from counterpoint.trainer.model.compiler import Fallback, failing_aloud, reason_of
from counterpoint.trainer.model.context import Stretch, stretch_of
from counterpoint.trainer.model.shared_prompts import Families
from counterpoint.trainer.model.text_part import text_config

logger = logging.getLogger(__name__)

_LEAST_BOUND = 1e-4
"""Nats: allowed difference of a chunked log-probability from one by whole logits, where rounding is smaller."""

_ROUNDINGS = 2
"""Steps of the largest logit's precision by which they may differ: a product of fewer tokens may add in another order."""

_TRIED = (-30.0, -3.0, -0.25, 0.5, 1.0, 20.0)
"""Made-up logits, to see what a model does with them; a soft cap bends the large ones."""


_COPIES = 32
"""Of tokens with which the compiled head is compared: kernels are made for numbers such as those at the first call."""


@dataclass(frozen=True, slots=True)
class TokenOutputs:
    """What the model says of chosen tokens of a row."""

    log_probabilities_P: Tensor
    """float32, natural, with gradient."""
    entropies_P: Tensor
    """float32, in nats, of the tokens' distributions; with gradient where it was asked for."""
    hidden_PH: Tensor | None
    """The last hidden states at the predicting positions, which the output layer gets; with gradient. None in a row that
    several ranks share, where no rank has them all."""


def prove_head(model: nn.Module) -> None:
    """Tests whether the model's logits are its output layer's product times a number, and stores that number on the model.

    If they are not, or the results differ from those by whole logits, the reason is logged and whole logits are used.
    """
    model.logits_scale, reason = None, ""
    try:
        with torch.no_grad():
            reason = _not_linear(model)
    except Exception as error:  # of any model's code
        if is_fatal(error):
            raise
        reason = f"{type(error).__name__}: {error}"
    if reason:
        model.logits_scale = None
        logger.warning(
            "%s: log-probabilities take memory for whole logits (tokens times vocabulary): %s", type(model).__name__, reason
        )  # fmt: skip


def _not_linear(model: nn.Module) -> str:
    """Stores the scale of the logits; returns why the head cannot be chunked, or an empty string."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return f"its output layer is a {type(head).__name__}; expected a linear layer"
    device, size = head.weight.device, len(_TRIED)
    generator = torch.Generator().manual_seed(0)
    tokens_T = torch.randint(0, text_config(model).vocab_size, (size,), generator=generator).to(device)
    positions_T = torch.arange(size, device=device)
    tried_P = torch.tensor(_TRIED, device=device)
    with _replaced(head, lambda hidden: tried_P.expand(*hidden.shape[:-2], size)[..., None]):
        given_P = _logits(model, tokens_T, positions_T, [size], positions_T)[..., 0].flatten().float()
    scales_P = given_P / tried_P
    scale = float(scales_P[-2])  # of 1.0
    if not scale or not bool(((scales_P - scale).abs() <= 1e-6 * abs(scale)).all()):
        return (
            f"it maps logits of {list(_TRIED)} to {[round(value, 3) for value in given_P.tolist()]}; expected multiples"
        )
    arguments = (model, tokens_T, positions_T, [size], positions_T, tokens_T, 1.0)
    largest: list[float] = []
    watch = head.register_forward_hook(lambda _head, _inputs, logits: largest.append(float(logits.abs().max())))
    whole = token_outputs(*arguments)
    watch.remove()
    model.logits_scale = scale
    chunked = token_outputs(*arguments)
    difference = float((chunked.log_probabilities_P - whole.log_probabilities_P).abs().max())
    step = torch.finfo(head.weight.dtype).eps * largest[0] * abs(scale)
    bound = max(_LEAST_BOUND, _ROUNDINGS * step)
    if not difference <= bound:
        return f"log-probabilities by chunks differ by {difference:.2g} nats from those by whole logits (at most {bound:.2g})"
    return ""


def compile_head(model: nn.Module) -> None:
    """Compiles the arithmetic of the chunks, and compares it with what is not compiled: values, entropies, gradients.

    If that fails, such as without a compiler, or they differ, the reason is logged and the head stays as it is. Call it after
    `prove_head`.
    """
    model.head_arithmetic = None
    if getattr(model, "logits_scale", None) is None:
        return
    try:
        compiled = ChunkArithmetic.compiled()
        with failing_aloud():
            reason = _differs_compiled(model, compiled)
    except Exception as error:  # of torch's compiler, or of the compiler that it calls
        if is_fatal(error):
            raise
        reason = reason_of(error)
    if not reason:
        model.head_arithmetic = ChunkArithmetic(*map(Fallback, compiled, ChunkArithmetic()))
    else:
        logger.warning("compile: the output layer of %s is not compiled: %s", type(model).__name__, reason)


def _differs_compiled(model: nn.Module, arithmetic: ChunkArithmetic) -> str:
    """Returns how the compiled head is another than the plain one; empty if it is not."""
    head, size = model.get_output_embeddings(), len(_TRIED)
    generator = torch.Generator().manual_seed(0)
    tokens_T = torch.randint(0, text_config(model).vocab_size, (size,), generator=generator).to(head.weight.device)
    positions_T = torch.arange(size, device=tokens_T.device)
    found: list[str] = []

    def forward(hidden_1PH: Tensor) -> Tensor:
        hidden_PH, targets_P = hidden_1PH[0].repeat(_COPIES, 1), tokens_T.repeat(_COPIES)
        for entropy_gradient in (False, True):
            plain, compiled = (
                _differentiated(head, hidden_PH, targets_P, entropy_gradient, each) for each in (None, arithmetic)
            )
            for name, own, other in zip(("log-probabilities", "entropies", "gradients"), compiled, plain, strict=True):
                precision = _LEAST_BOUND if name != "gradients" else _ROUNDINGS * torch.finfo(other.dtype).eps
                bound = max(_LEAST_BOUND, precision) * max(1.0, float(other.abs().max()))
                difference = float((own - other).abs().max())
                if not difference <= bound:
                    found.append(f"{name} differ by {difference:.2g} (at most {bound:.2g})")
        return hidden_1PH[..., :1]

    with torch.no_grad(), _replaced(head, forward):
        _logits(model, tokens_T, positions_T, [size], positions_T)
    return "; ".join(found)


@torch.enable_grad()
def _differentiated(
    head: nn.Module, hidden_PH: Tensor, targets_P: Tensor, entropy_gradient: bool, arithmetic: ChunkArithmetic | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities, entropies, and the gradient of a mix of them by the hidden states."""
    given_PH = hidden_PH.detach().requires_grad_()
    bias_V = None if head.bias is None else head.bias.detach()
    divisor_P = torch.linspace(0.5, 1.5, len(targets_P), device=targets_P.device)
    values_P, entropies_P = chunked_outputs(
        given_PH,
        head.weight.detach(),
        bias_V,
        targets_P,
        divisor_P,
        entropy_gradient=entropy_gradient,
        arithmetic=arithmetic,
    )
    weighted_P = values_P * divisor_P + (entropies_P if entropy_gradient else 0)
    (gradient_PH,) = torch.autograd.grad(weighted_P.sum(), given_PH)
    return values_P.detach(), entropies_P.detach(), gradient_PH


def token_outputs(
    model: nn.Module,
    token_ids_T: Tensor,
    position_ids_T: Tensor,
    sample_lengths: list[int],
    predicting_P: Tensor,
    targets_P: Tensor,
    temperature: Tensor | float,
    *,
    entropy_gradient: bool = False,
    families: Families | None = None,
    places_R: Tensor | None = None,
) -> TokenOutputs:
    """Runs the model on a packed row; the arguments are those of `counterpoint/trainer/model/load.py: log_probabilities`.

    With `places_R` a token may have several targets: `targets_P` and the results are `[R]`, each of the token at its place in
    `predicting_P`, whose order the places keep. Such a row is not shared by ranks.

    Inside `shared_rows` this rank runs it on its stretch of the row, and the results are those of the row. Such a row has no
    `families`.

    Raises `ValueError`: the model has no output layer, or does not call it.
    """
    stretch = stretch_of(model, len(token_ids_T))
    if stretch is not None:
        assert families is None
        assert places_R is None
        own_p, counts = stretch.predictions(predicting_P)
        own = _outputs(
            model,
            stretch.take(token_ids_T),
            stretch.take(position_ids_T),
            stretch.sample_lengths(sample_lengths),
            predicting_P[own_p] - stretch.start,
            targets_P[own_p],
            temperature[own_p] if isinstance(temperature, Tensor) else temperature,
            entropy_gradient,
            stretch,
        )
        log_probabilities_P, entropies_P = (
            stretch.gather(each, counts) for each in (own.log_probabilities_P, own.entropies_P)
        )
        return TokenOutputs(log_probabilities_P, entropies_P, None)
    return _outputs(
        model,
        token_ids_T,
        position_ids_T,
        sample_lengths,
        predicting_P,
        targets_P,
        temperature,
        entropy_gradient,
        None,
        families,
        places_R,
    )


def _outputs(
    model: nn.Module,
    token_ids_T: Tensor,
    position_ids_T: Tensor,
    sample_lengths: list[int],
    predicting_P: Tensor,
    targets_P: Tensor,
    temperature: Tensor | float,
    entropy_gradient: bool,
    stretch: Stretch | None,
    families: Families | None = None,
    places_R: Tensor | None = None,
) -> TokenOutputs:
    """Does so for a row, or for a stretch, of which `sample_lengths` are those of the whole row."""
    head, scale = model.get_output_embeddings(), getattr(model, "logits_scale", None)
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output layer")
    divisor_P = torch.ones(len(predicting_P), device=token_ids_T.device).mul_(temperature)
    if places_R is not None:
        divisor_P = divisor_P[places_R]
    undivided = not isinstance(temperature, Tensor) and temperature == scale
    chunk_divisor_P = None if scale is None or undivided else divisor_P / scale
    called: list[Tensor] = []
    plain = head.forward

    def forward(hidden_1PH: Tensor) -> Tensor:
        if hidden_1PH.shape[-2] != len(predicting_P):  # the model knows no `logits_to_keep`
            hidden_1PH = hidden_1PH[..., predicting_P, :]
        called.append(hidden_1PH)
        if places_R is not None:
            hidden_1PH = hidden_1PH[..., places_R, :]
        if scale is None:
            logits: Tensor = plain(hidden_1PH)
            return logits
        hidden_PH = hidden_1PH.flatten(0, -2)
        values_P, entropies_P = chunked_outputs(
            hidden_PH, head.weight, head.bias, targets_P, chunk_divisor_P, entropy_gradient=entropy_gradient,
            arithmetic=getattr(model, "head_arithmetic", None),
        )  # fmt: skip
        shape = hidden_1PH.shape[:-1]
        return torch.stack([values_P.view(shape), entropies_P.view(shape)], -1)  # no view, whose hooks FSDP would lose

    with _replaced(head, forward):
        given = _logits(model, token_ids_T, position_ids_T, sample_lengths, predicting_P, stretch, families)[0]
    if len(called) != 1:
        raise ValueError(f"{type(model).__name__} called its output layer {len(called)} times; expected once")
    if scale is None:
        values_P, entropies_P = _whole_outputs(given, targets_P, divisor_P, entropy_gradient)
    else:
        values_P, entropies_P = (given if scale == 1 else given / scale).unbind(-1)
        entropies_P = entropies_P if entropy_gradient else entropies_P.detach()
    return TokenOutputs(values_P, entropies_P, called[0].flatten(0, -2))


def _whole_outputs(
    logits_PV: Tensor, targets_P: Tensor, divisor_P: Tensor, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Does the same as `chunked_outputs` by whole logits, for models whose head is not linear."""
    log_probabilities_PV = torch.log_softmax(logits_PV.float() / divisor_P[:, None], dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        logarithms_PV = log_probabilities_PV.clamp(min=LEAST_LOGARITHM)
        entropies_P = -(logarithms_PV.exp() * logarithms_PV).sum(-1)
    return log_probabilities_PV.gather(-1, targets_P[:, None])[:, 0], entropies_P


def _logits(
    model: nn.Module,
    token_ids_T: Tensor,
    position_ids_T: Tensor,
    sample_lengths: list[int],
    predicting_P: Tensor,
    stretch: Stretch | None = None,
    families: Families | None = None,
) -> Tensor:
    logits: Tensor = model(
        input_ids=token_ids_T[None],
        position_ids=position_ids_T[None],
        use_cache=False,
        logits_to_keep=predicting_P,
        sample_lengths=sample_lengths,
        **({} if stretch is None else {"stretch": stretch}),
        **({} if families is None else {"families": families}),
    ).logits
    return logits


@contextmanager
def _replaced(head: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Calls `forward` instead of the head's own; hooks on the head run as usual."""
    before = head.__dict__.get("forward")
    head.forward = forward
    try:
        yield
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before
