"""Tiny models and their tokenizer, built offline, and the way from a model's name to its directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.models.build import make_model as make_model
    from counterpoint.models.tiny_tokenizer import END_OF_TURN as END_OF_TURN
    from counterpoint.models.tiny_tokenizer import write_tokenizer as write_tokenizer
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
