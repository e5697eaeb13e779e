"""Writes the proof of a broadcast: a digest of the weights, and a probe, which is a few tokens with their log-probabilities.

A server that has loaded the weights must show the digest and reproduce the probe before it takes traffic; `docs/inference.md`
says what each of them detects. The previous version's log-probabilities are published, too, to detect a server whose kernels
still compute with that version. A bfloat16 model publishes none, since rounding changes its log-probabilities as much as a step
does. The tokens are a seeded random sequence: of several, the one that rounding moves least (`rounded`). How
far it moves each token is published. Where two experts of a mixture are nearly equal, rounding may route a token differently in
another engine, and correct weights would fail the probe.

The probe of a published adapter also proves the model to a run that begins with it (`training.lora.start_from`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from counterpoint.inference.base import LEAST_TOLERANCE, MAX_PROBE_BYTES, Probe
from counterpoint.inference.digest import Digest
from counterpoint.inference.model_facts import EXPERT_COUNTS
from counterpoint.trainer.lora.multi_lora import adapter_spans
from counterpoint.trainer.model.load import log_probabilities
from counterpoint.trainer.model.packing_proof import can_pack
from counterpoint.trainer.model.text_part import text_config
from counterpoint.transport.files.untrusted import read_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answers:
    """What the model says of the candidates: `C` is `CANDIDATES` of a mixture whose samples are packed, else 1, to save time."""

    tokens_CT: Tensor
    """int64 `[C, TOKENS]`, on the CPU."""
    values_CP: Tensor
    """float32 `[C, TOKENS - 1]`, on the CPU: log-probabilities."""
    chosen: int
    """The candidate to publish."""
    rounding_P: Tensor
    """float32 `[TOKENS - 1]`, on the CPU: nats by which rounding may move each of its log-probabilities in another engine."""


class BrokenWeights(RuntimeError):
    """Weights whose results are not finite; they must not be published."""


FOREIGN_SHARE = 0.5
"""Root mean square difference to the log-probabilities of an adapter's own base model, in shares of their spread, beyond which a
base model is another one. Those of other random models are 1 or more away; of the same model in the other precision mostly below
0.1, and up to 0.4 with 8 layers of experts."""

CANDIDATES = 8
TOKENS = 12

ROUNDINGS_TO_CHOOSE = 4
"""How often every candidate is rounded."""

ROUNDINGS = 32
"""How often the chosen one is rounded. What happens once in 7 times is then seen with a probability of 99 %."""

FEW_ROUNDINGS = 8
"""The same, where there is one candidate: without experts nothing happens seldom, and otherwise each takes a forward pass."""

_SEED = 20_240_229


def write_probe(
    model: nn.Module,
    version: int,
    path: Path,
    slot: int,
    digests: Mapping[str, Digest],
    previous: Tensor | None,
    answers: Answers | None = None,
) -> Tensor:
    """Computes the probe of a policy version at temperature 1 and writes it as `docs/contracts.md` says.

    Args:
        model: with the weights of `version`.
        version: the policy version.
        path: of the file.
        slot: of the run, whose adapter computes the tokens where the model has adapters.
        digests: of the weights, by the precision of a server.
        previous: the result for the version before, if known. Only a float32 model publishes it.
        answers: of `ask`, for a sharded model; None: the model is asked here.

    Returns:
        float32 `[C, TOKENS - 1]`, on the CPU: the log-probabilities of all candidates.

    Raises:
        BrokenWeights: a log-probability is not finite.
    """
    answers = answers or ask(model, slot)
    values_CP, chosen = answers.values_CP, answers.chosen
    if not bool((values_CP[chosen].isfinite() & answers.rounding_P.isfinite()).all()):
        raise BrokenWeights(f"version {version}: the probe's log-probabilities are not finite; the weights are broken")
    before = previous[chosen] if previous is not None and next(model.parameters()).dtype == torch.float32 else None
    probe = {
        "version": version,
        "token_ids": answers.tokens_CT[chosen].tolist(),
        "log_probabilities": values_CP[chosen].tolist(),
        "rounding": answers.rounding_P.tolist(),
        "previous": before.tolist() if before is not None and bool(before.isfinite().all()) else None,
        "digests": digests,
    }
    path.write_bytes(orjson.dumps(probe))
    return values_CP


def ask(model: nn.Module, slot: int) -> Answers:
    """Computes the candidates with the adapter in `slot`, if there is one; with a sharded model every rank calls it."""
    return _ask(model, [slot])[0]


def ask_together(model: nn.Module, slots: Sequence[int], row_tokens: int) -> list[Answers]:
    """Computes the candidates with the adapter in each of these slots, in passes of about `row_tokens` tokens at most.

    An adapter's answers are those of `ask` but for rounding, and in less time: alone, its few tokens leave a device idle.
    """
    tokens = CANDIDATES * (1 + ROUNDINGS_TO_CHOOSE) * TOKENS if _chooses(model) else (1 + FEW_ROUNDINGS) * TOKENS
    size = max(1, row_tokens // tokens) if can_pack(model) else 1
    return [each for first in range(0, len(slots), size) for each in _ask(model, slots[first : first + size])]


def _chooses(model: nn.Module) -> bool:
    return can_pack(model) and any(getattr(text_config(model), name, None) for name in EXPERT_COUNTS)


def _ask(model: nn.Module, slots: Sequence[int]) -> list[Answers]:
    """Computes the candidates with the adapter in each of `S` slots, of more than one only where samples are packed."""
    chooses = _chooses(model)
    generator = torch.Generator().manual_seed(_SEED)
    tokens_CT = torch.randint(0, text_config(model).vocab_size, (CANDIDATES, TOKENS), generator=generator)
    tokens_CT = tokens_CT[: CANDIDATES if chooses else 1].to(next(model.parameters()).device)
    chosen_S = torch.zeros(len(slots), dtype=torch.int64)
    with torch.no_grad():
        values_SCP, moved_SCP = _values_and_moved(
            model, tokens_CT.expand(len(slots), -1, -1), ROUNDINGS_TO_CHOOSE if chooses else FEW_ROUNDINGS, slots
        )
        if chooses:
            moved_SC = moved_SCP.square().mean(dim=2).sqrt()
            chosen_S = (moved_SC / values_SCP.std(dim=2, correction=0).clamp_min(LEAST_TOLERANCE)).argmin(dim=1)
            _, moved_SCP = _values_and_moved(model, tokens_CT[chosen_S].unsqueeze(1), ROUNDINGS, slots)
    found = zip(values_SCP.cpu(), chosen_S.tolist(), moved_SCP[:, 0].cpu(), strict=True)
    return [Answers(tokens_CT.cpu(), values_CP, chosen, moved_P) for values_CP, chosen, moved_P in found]


def _values_and_moved(
    model: nn.Module, tokens_SNT: Tensor, roundings: int, slots: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of sequences, and by how much the model's rounding moves each at most, of so many times.

    Both are `[S, N, TOKENS - 1]`, in nats. Where samples are packed, one pass computes all.
    """
    if can_pack(model):
        with rounded(model, exact=tokens_SNT[0].numel(), parts=len(slots)):
            found_SNP = _forward(model, tokens_SNT.repeat(1, 1 + roundings, 1), slots)
        values_SNP, *again = found_SNP.split(tokens_SNT.shape[1], dim=1)
    else:
        values_SNP = _forward(model, tokens_SNT, slots)
        with rounded(model):
            again = [_forward(model, tokens_SNT, slots) for _ in range(roundings)]
    return values_SNP, (torch.stack(again) - values_SNP).abs().amax(dim=0)


def check_base(directory: Path, answers: Answers) -> None:
    """Raises `ValueError` if the probe in the directory of a published adapter shows that its base model was another one.

    `answers` are those of this model with that adapter. Nothing is compared without a probe, as beside an adapter of another
    program, or where its tokens are not among the candidates. A lesser difference is logged.
    """
    path = directory / "probe.json"
    try:
        probe = replace(Probe.parse(read_bytes(path, MAX_PROBE_BYTES), path), previous=None)
    except FileNotFoundError:
        return
    for tokens_T, values_P in zip(answers.tokens_CT.tolist(), answers.values_CP.numpy(), strict=True):
        if tokens_T != probe.token_ids or probe.mismatch(values_P, None) is None:
            continue
        expected_P = np.asarray(probe.log_probabilities)
        apart, spread = float(np.sqrt(np.square(values_P - expected_P).mean())), float(expected_P.std())
        said = f"log-probabilities of this base model with it are {apart:.3g} (root mean square) from those in {path}"
        if not apart <= max(FOREIGN_SHARE * spread, LEAST_TOLERANCE):
            raise ValueError(
                f"the adapter was trained over another base model, or the adapter is not the one that was published: {said}, "
                f"which spread by {spread:.3g}; use its own base model, or the adapter's own directory (a copy of the adapter "
                "without that file is not compared)"
            )
        logger.warning(
            "an adapter to begin with: %s, which spread by %.3g; another precision of the trainer may explain it, or the base "
            "model or the adapter was changed since",
            said, spread,
        )  # fmt: skip


def _forward(model: nn.Module, tokens_SNT: Tensor, slots: Sequence[int]) -> Tensor:
    """Returns the log-probabilities of each slot's sequences `[S, N, TOKENS]` in one row, `[S, N, TOKENS - 1]`."""
    each, device = tokens_SNT.shape[1], tokens_SNT.device
    sequences = len(slots) * each
    positions_T = torch.arange(TOKENS, device=device).repeat(sequences)
    predicting_NP = torch.arange(sequences * TOKENS, device=device).view(sequences, TOKENS)[:, :-1]
    with adapter_spans(model, [(slot, each * TOKENS) for slot in slots]):
        values_P, _ = log_probabilities(
            model,
            tokens_SNT.flatten(),
            positions_T,
            [TOKENS] * sequences,
            predicting_NP.flatten(),
            tokens_SNT[..., 1:].flatten(),
            1.0,
        )
    return values_P.view(len(slots), each, TOKENS - 1)


UNIT = 2.0**-9
"""The largest relative error of a number that is rounded to bfloat16."""

STRENGTH = 8.0
"""Strength with which what is seen in 32 passes bounds the difference between two engines (`docs/inference.md` has figures)."""

_ROUNDING_SEED = 0


@contextmanager
def rounded(model: nn.Module, exact: int = 0, parts: int = 1) -> Iterator[None]:
    """Changes what the layers of `model` get in every forward pass inside, by the same numbers each time that it is entered.

    A pass has so many equal `parts`, which are changed alike. The first `exact` tokens of each are left as they are.

    Another engine adds the same numbers in another order, and perhaps in a lower precision, so its results differ. By how much
    depends on the model: a mixture whose gate finds two experts nearly equal may send a token to the other one. No bound is right
    for all models, so each model's is measured. Every element of what a layer gets is changed, independently, by up to `STRENGTH`
    times the largest relative error of bfloat16. Within a layer numbers are rounded several times, and each of two engines has
    its own errors.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    generator = torch.Generator().manual_seed(_ROUNDING_SEED)  # on the CPU: the same numbers on every device

    def change(hidden: Tensor) -> Tensor:
        divided = hidden.unflatten(-2, (parts, -1))
        kept, moved = divided[..., :exact, :], divided[..., exact:, :]
        noise = torch.rand(moved.select(-3, 0).shape, generator=generator).unsqueeze(-3).to(hidden.device)
        moved = (moved.float() * (1 + (2 * noise - 1) * (STRENGTH * UNIT))).to(hidden.dtype)
        return (torch.cat([kept, moved], dim=-2) if exact else moved).flatten(-3, -2)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
