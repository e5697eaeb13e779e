"""What a loss of your own gets and returns (docs/training.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from trainer import *
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
