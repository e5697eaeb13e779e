"""What an advantage function of your own gets and returns (docs/algorithms.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.orchestrator.step.advantages import AdvantageInputs as AdvantageInputs
    from counterpoint.orchestrator.step.advantages import AdvantageOutputs as AdvantageOutputs
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
