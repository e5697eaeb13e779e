"""The daemon: one process, one uvloop loop, from examples to batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from orchestrator.step.advantages import AdvantageInputs as AdvantageInputs
    from orchestrator.step.advantages import AdvantageOutputs as AdvantageOutputs
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
