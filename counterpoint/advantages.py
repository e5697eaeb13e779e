"""What an advantage function of your own gets and returns (docs/algorithms.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from orchestrator import *
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
