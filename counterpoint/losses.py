"""What a loss of your own gets and returns (docs/training.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.trainer.losses.contract import LossInputs as LossInputs
    from counterpoint.trainer.losses.contract import LossOutputs as LossOutputs
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
