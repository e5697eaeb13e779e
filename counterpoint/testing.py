"""Tests of an environment without a server: a script in the model's place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.environments.chat import Chat as Chat
    from counterpoint.environments.scripted import ScriptedModel as ScriptedModel
    from counterpoint.environments.scripted import play as play
    from counterpoint.models.tiny_tokenizer import write_tokenizer as write_tokenizer
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
