"""Splits the mismatch KL of a step among its causes, from log-probabilities of its trained tokens. Pure.

A token's part is exp(d) - 1 - d with d = log p_trainer - log p_inference, as in the metric `mismatch_kl`. A cause is what falls
away without it: staleness if the trainer computes with the weights that sampled, precision if it computes in float32, and the
rest is the kernels', but for a group of tokens that stands out. So the causes add up to the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from counterpoint.trainer.again.outliers import (
    LEAST_TOKENS,
    TokenGroups,
    Values,
    comparable,
    noise,
    stands_out,
)
from counterpoint.transport.printable import printable

LARGE = 0.001
"""Nats. A rest beyond this is looked into even if no group stands out. It counts as a fault only if something explains it. In the
demo vLLM has 0.00004 to 0.0001 in bfloat16."""

ADDS_UP = 0.05
"""The largest difference between the computed and the recorded value, as a share of the latter."""

NEGLIGIBLE = 1e-9
"""Nats. Below this, where the two are rounding alone, they need not be the same."""

ALL = "all"


@dataclass(frozen=True, slots=True)
class Fault:
    """Tokens whose log-probabilities another cause than kernels has moved."""

    key: str
    """One of `KEYS`, or `all`."""
    group: str
    tokens: int
    mean: float
    """Their mean, in nats, with the weights that sampled and in float32."""
    others: float
    """The mean of all other tokens."""
    explanation: str = ""
    """What would make them agree, in words; empty if nothing that was tried does."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The log-probability of each trained token of a step, float64 `[P]` each; not a number where weights were not kept."""

    inference_P: Values
    """These are by the server."""
    now_P: Values
    """These are by the trainer, with the weights before the step."""
    then_P: Values
    """These are by the trainer, with the weights that sampled."""
    exact_P: Values
    """The same in float32."""
    temperature_P: Values
    groups: TokenGroups


@dataclass(slots=True)
class Split:
    """The mismatch KL of a step, in nats a trained token."""

    run: str
    step: int
    tokens: int
    recorded: float | None
    """The metric `mismatch_kl` of the step; None if its line is gone."""
    computed: float
    """The same, computed again with the weights before the step."""
    parts: dict[str, float] = field(default_factory=dict)
    """Adds up to `computed`: `staleness`, `precision`, `kernels`, `fault`, and `unknown`, of weights that were not kept."""
    by_lag: dict[int, float] = field(default_factory=dict)
    """Staleness of the tokens of each lag, in nats a token of these."""
    fault: Fault | None = None
    untold: str = ""
    """What has more noise than the others, but cannot be told from its content, in words; empty if nothing."""
    untried: str = ""
    """Why nothing was tried to explain tokens that stand out, or a large rest; empty if it was, or there are none."""
    compared: list[str] = field(default_factory=list)
    """The keys by which two groups or more have enough tokens to be compared."""
    truncated: bool | None = False
    """Whether any token was sampled from a truncated distribution, so that the rest may be what was cut off; None if the records
    that say it are gone."""
    adapter: str = ""
    """The adapter that all tokens are of, in words; empty with full weights."""
    several_updates: bool = False
    """Whether the recorded value is also of weights between the step's updates."""

    @property
    def adds_up(self) -> bool:
        """Whether the computed value is the recorded one."""
        if self.recorded is None:
            return False
        return abs(self.computed - self.recorded) <= max(ADDS_UP * self.recorded, NEGLIGIBLE)

    def values(self) -> dict[str, Any]:
        """Returns the result as plain values, for JSON."""
        return asdict(self) | {"adds_up": self.adds_up}

    def text(self) -> str:
        """Returns the result for a person."""
        rest = "the rest: the servers' own precision and kernels"
        said = {
            "staleness": "the weights moved since the tokens were sampled",
            "precision": "the trainer's dtype, against float32",
            "kernels": f"{rest}, and what top_p, top_k or min_p cut off" if self.truncated else rest,
            "fault": "tokens that stand out",
            "unknown": "weights that sampled were not kept",
        }
        lines = [
            f"{name:<11}{value:>10.3g}  {round(value / (self.computed or 1.0), 2) + 0.0:4.0%}  {said[name]}"
            for name, value in self.parts.items()
            if value or name not in ("fault", "unknown")
        ]
        lines += [f"staleness of {lag}: {value:.3g} a token" for lag, value in sorted(self.by_lag.items())]
        lines += map(printable, self._said_of_fault())
        recorded = "not recorded" if self.recorded is None else f"{self.recorded:.3g} recorded"
        lines.append(
            f"run {self.run}, step {self.step}: mismatch KL {self.computed:.3g} nats a token computed, {recorded}"
        )
        if self.recorded is not None and not self.adds_up:
            moved, other = "the weights move between the step's updates", "rows were shared, or it ran elsewhere"
            lines.append(f"the two are not the same: {moved if self.several_updates else other}")
        return "\n".join(lines)

    def _said_of_fault(self) -> Iterator[str]:
        if (fault := self.fault) is None:
            none = "none is accused" if self.untold else "none stands out"
            few = f"no two groups have {LEAST_TOKENS} tokens that are uncertain and in different contexts"
            yield (
                f"compared by {', '.join(self.compared)}: {none}"
                if self.compared
                else f"nothing could be compared: {few}"
            )
        if self.untold:
            yield self.untold
        if fault is not None:
            where = "all tokens" if fault.key == ALL else f"{fault.key} {fault.group}"
            where += f", of {self.adapter}," if self.adapter else ""
            others = "" if fault.key == ALL else f", all others {fault.others:.3g}"
            yield f"fault: the {fault.tokens} tokens of {where} have {fault.mean:.3g} a token{others}"
            if not self.untried:
                yield f"       {fault.explanation or 'nothing that was tried explains them'}"
        if self.untried:
            yield f"what explains the rest was not looked for: {self.untried}"

    def put_fault(self, fault: Fault | None) -> None:
        """Takes a fault over, or drops it. What its tokens have more than the others is its part, and not the kernels'."""
        self.parts["kernels"] += self.parts["fault"]
        self.parts["fault"] = 0.0 if fault is None else (fault.mean - fault.others) * fault.tokens / self.tokens
        self.parts["kernels"] -= self.parts["fault"]
        self.fault = fault


def divergence(trainer_P: Values, inference_P: Values) -> Values:
    """Returns each token's part of the mismatch KL."""
    difference_P = trainer_P - inference_P
    return np.expm1(difference_P) - difference_P


def split(result: Split, computed: Computed) -> npt.NDArray[np.bool_]:
    """Fills in the parts of a split, and the tokens that stand out as its fault, without an explanation; returns which these are.

    Where none do, and the rest is large, the fault is of all tokens: it is one only if something explains it.
    """
    now_P, then_P, rest_P = (
        divergence(each, computed.inference_P) for each in (computed.now_P, computed.then_P, computed.exact_P)
    )
    known_P = np.isfinite(then_P)
    of_known = [float(each[known_P].sum()) / result.tokens for each in (now_P, then_P, rest_P)]
    result.parts = {
        "staleness": of_known[0] - of_known[1],
        "precision": of_known[1] - of_known[2],
        "kernels": of_known[2],
        "fault": 0.0,
        "unknown": float(now_P[~known_P].sum()) / result.tokens,
    }
    for lag in np.unique(computed.groups.codes["lag"][known_P]).tolist():
        own_P = known_P & (computed.groups.codes["lag"] == lag)
        result.by_lag[int(lag)] = float((now_P - then_P)[own_P].mean())
    noise_P = noise(rest_P, computed.exact_P, computed.inference_P, computed.temperature_P, computed.groups)
    result.compared = comparable(noise_P, computed.groups, result.truncated)
    found = stands_out(rest_P, noise_P, computed.groups, result.truncated)
    if found is not None and found.content:
        result.untold = f"{found.key} {found.group} has more noise, which cannot be told from {found.content}"
    elif found is not None:
        faulty_P = found.tokens_P & known_P
        others_P = known_P & ~faulty_P
        mean, others = float(rest_P[faulty_P].mean()), float(rest_P[others_P].mean())
        result.put_fault(Fault(found.key, found.group, int(faulty_P.sum()), mean, others))
        return faulty_P
    if known_P.any() and (mean := float(rest_P[known_P].mean())) > LARGE:
        result.put_fault(Fault(ALL, ALL, int(known_P.sum()), mean, 0.0))
    return known_P
