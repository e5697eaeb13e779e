"""The trainer of many runs, by the names of its document: `runs` and `lora` (docs/conformance.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.trainer import lora as lora
    from counterpoint.trainer import runs as runs
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
