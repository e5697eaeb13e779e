"""The trainer: receives batches, trains each run's weights on them, and publishes the weights for inference."""

import importlib
import os
from typing import TYPE_CHECKING, Any

# OpenMP's threads spin while they wait for each other. Where inference shares the cores, the awaited thread is not running, and a
# step of 0.3 s took 10 s. OpenMP reads this when torch loads it, so it is set before any module here imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from trainer.losses.contract import LossInputs as LossInputs
    from trainer.losses.contract import LossOutputs as LossOutputs

_EXPORTS = {
    "LossInputs": "trainer.losses.contract",
    "LossOutputs": "trainer.losses.contract",
}
"""The module that defines each name. It is imported at the first use, since it imports torch."""


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
