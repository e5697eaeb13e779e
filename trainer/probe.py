"""Writes the proof of a broadcast: a digest of the weights, and a probe, which is a few tokens with their log-probabilities.

A server that has loaded the weights must show the digest and reproduce the probe before it takes traffic; `docs/inference.md`
says what each of them detects. The previous version's log-probabilities are published, too, to detect a server whose kernels
still compute with that version. A bfloat16 model publishes none, since rounding changes its log-probabilities as much as a step
does. The tokens are a seeded random sequence. For a mixture of experts, the sequence of several with the clearest
routing is chosen: where two experts are nearly equal, rounding may route a token differently in another engine, and correct
weights would fail the probe.

The probe of a published adapter also proves the model to a run that begins with it (`training.lora.start_from`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import orjson
import torch
from torch import Tensor, nn

from inference.base import LEAST_TOLERANCE, MAX_PROBE_BYTES, Probe
from inference.plugin.digest import Digest
from trainer.lora.multi_lora import adapter_spans
from trainer.model.load import log_probabilities
from trainer.model.packing_proof import can_pack
from trainer.model.router_replay import RouterReplay
from transport.files.untrusted import read_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answers:
    """What the model says of the candidates: `C` is `CANDIDATES` with routers, 1 without."""

    tokens_CT: Tensor
    """int64 `[C, TOKENS]`, on the CPU."""
    values_CP: Tensor
    """float32 `[C, TOKENS - 1]`, on the CPU: log-probabilities."""
    chosen: int
    """The candidate to publish."""


class BrokenWeights(RuntimeError):
    """Weights whose results are not finite; they must not be published."""


FOREIGN_SHARE = 0.5
"""Root mean square difference to the log-probabilities of an adapter's own base model, in shares of their spread, beyond which a
base model is another one. Those of other random models are 1 or more away; of the same model in the other precision mostly below
0.1, and up to 0.4 with 8 layers of experts."""

CANDIDATES = 8
TOKENS = 12
_SEED = 20_240_229


def write_probe(
    model: nn.Module,
    replay: RouterReplay | None,
    version: int,
    path: Path,
    slot: int,
    digests: Mapping[str, Digest],
    previous: Tensor | None,
    answers: Answers | None = None,
) -> Tensor:
    """Computes the probe of a policy version at temperature 1, without replay, and writes it as `docs/contracts.md` says.

    Args:
        model: with the weights of `version`.
        replay: of the model's router; None without it.
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
    answers = answers or ask(model, replay, slot)
    values_CP, chosen = answers.values_CP, answers.chosen
    if not bool(values_CP[chosen].isfinite().all()):
        raise BrokenWeights(f"version {version}: the probe's log-probabilities are not finite; the weights are broken")
    before = previous[chosen] if previous is not None and next(model.parameters()).dtype == torch.float32 else None
    probe = {
        "version": version,
        "token_ids": answers.tokens_CT[chosen].tolist(),
        "log_probabilities": values_CP[chosen].tolist(),
        "previous": before.tolist() if before is not None and bool(before.isfinite().all()) else None,
        "digests": digests,
    }
    path.write_bytes(orjson.dumps(probe))
    return values_CP


def ask(model: nn.Module, replay: RouterReplay | None, slot: int) -> Answers:
    """Computes the candidates with the adapter in `slot`, if there is one; with a sharded model every rank calls it."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(_SEED)
    candidates = 1 if replay is None else CANDIDATES
    tokens_CT = torch.randint(0, model.config.vocab_size, (CANDIDATES, TOKENS), generator=generator)[:candidates]
    together = candidates if can_pack(model) else 1
    answers: list[Tensor] = []
    rows: list[dict[int, Tensor]] = []
    with torch.no_grad(), adapter_spans(model, [(slot, together * TOKENS)]):
        for row_CT in tokens_CT.to(device).split(together):
            observing: AbstractContextManager[dict[int, Tensor]]
            observing = replay.observing() if replay is not None else nullcontext({})
            with observing as observed:
                answers.append(_forward(model, row_CT))
            rows.append(observed)
    flat_P = torch.cat(answers)
    chosen = _clearest(
        {layer: torch.cat([row[layer] for row in rows]) for layer in rows[0]}, replay.top_k if replay else 0
    )
    return Answers(tokens_CT, flat_P.view(candidates, TOKENS - 1).cpu(), chosen)


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


def _forward(model: nn.Module, tokens_CT: Tensor) -> Tensor:
    """Returns the log-probabilities of the candidates `[C, TOKENS]` in one row, `[C * (TOKENS - 1)]`."""
    candidates, device = len(tokens_CT), tokens_CT.device
    positions_T = torch.arange(TOKENS, device=device).repeat(candidates)
    predicting_CP = torch.arange(candidates * TOKENS, device=device).view(candidates, TOKENS)[:, :-1]
    targets_CP = tokens_CT[:, 1:]
    values_P, _ = log_probabilities(
        model,
        tokens_CT.flatten(),
        positions_T,
        [TOKENS] * candidates,
        predicting_CP.flatten(),
        targets_CP.flatten(),
        1.0,
    )
    return values_P


def _clearest(probabilities: dict[int, Tensor], top_k: int) -> int:
    """Returns the candidate with the largest minimum gap between the last chosen expert and the next one."""
    if not probabilities or next(iter(probabilities.values())).shape[-1] <= top_k:
        return 0
    gaps_C = torch.full((CANDIDATES,), torch.inf)
    for probabilities_TE in probabilities.values():
        ranked = probabilities_TE.topk(top_k + 1, dim=-1).values
        gap_T = ranked[:, top_k - 1] - ranked[:, top_k]
        gaps_C = torch.minimum(gaps_C, gap_T.view(CANDIDATES, TOKENS).amin(dim=1).cpu())
    return int(gaps_C.argmax())
