"""The daemon: one process, one uvloop loop, from examples to batches."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.step.advantages import AdvantageInputs as AdvantageInputs
    from orchestrator.step.advantages import AdvantageOutputs as AdvantageOutputs

_EXPORTS = {
    "AdvantageInputs": "orchestrator.step.advantages",
    "AdvantageOutputs": "orchestrator.step.advantages",
}
"""The module of each exported name. It is imported at the first access."""


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
