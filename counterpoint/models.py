"""Tiny models and their tokenizer, built offline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from models.make_model import make_model as make_model
    from models.tiny_tokenizer import END_OF_TURN as END_OF_TURN
    from models.tiny_tokenizer import write_tokenizer as write_tokenizer
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
