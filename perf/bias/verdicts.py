"""What an expected update is beside the true policy gradient: equal, a multiple, or biased, at each decision of the processes.

A decision is a state of `processes.py`. The policy is moved there along one direction, so the update divided by the gradient is
one number for each decision. It is the same number everywhere where the update is unbiased (1) or scaled by a constant.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from perf.bias.processes import POLICIES, true_gradient
from perf.bias.update import Case, expected_update

_CLOSE = 1e-9
"""Where not all is exact, updates that are this close to a multiple of the gradient are called one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The expected update over the true gradient, for each decision in the order of `POLICIES`."""

    ratios: tuple[Fraction, ...]
    exact: bool

    @property
    def is_biased(self) -> bool:
        """Whether the update is no multiple of the gradient, or one against it."""
        least, most = min(self.ratios), max(self.ratios)
        return least <= 0 or (least != most if self.exact else most - least > _CLOSE)

    def __str__(self) -> str:
        least, most = min(self.ratios), max(self.ratios)
        if least == most == 0:
            return "no update"
        if self.is_biased:
            return f"biased: {self._shown(least)} to {self._shown(most)}"
        if self.exact and least == 1:
            return "unbiased"
        return f"scaled: {self._shown(least)}"

    def _shown(self, ratio: Fraction) -> str:
        return str(ratio) if self.exact else f"~{round(float(ratio), 3) + 0.0:.3f}"


def verdict(case: Case) -> Verdict:
    """Returns the verdict on what a run is configured with. Raises `ValueError` as `expected_update`."""
    update, true = expected_update(case), true_gradient()
    return Verdict(tuple(update.gradient[state, 1] / true[state, 1] for state in POLICIES), update.exact)
