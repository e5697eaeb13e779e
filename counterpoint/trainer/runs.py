"""The runs of a trainer: the manager that any of its code asks (docs/conformance.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from run.config import RunConfig as RunConfig
    from trainer.runs import *
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
