"""Saved weights, or the base model, as the model that a session of the gateway asks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from counterpoint.environments.base import OnePolicy, Reply
from counterpoint.environments.chat import Chat, Tool
from counterpoint.environments.sampling import SAMPLED, SamplingConfig, SamplingOverrides
from counterpoint.inference.base import SamplingParameters
from counterpoint.run.parsed_turn import parsed_turn
from counterpoint.service.samplers import Metered, Samplers
from counterpoint.transport.records import Turn


class ChatModel(OnePolicy):
    """The `environments.base.Model` of one request."""

    def __init__(
        self,
        samplers: Samplers,
        chat: Chat,
        adapter: tuple[str, Path] | None,
        longest: int,
        key: str,
        reserve: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """Samples from an adapter, its name and directory, or from the base model: `longest` tokens, the prompt included.

        The request is of `key`. The model enters `reserve` while it may use `longest` tokens.
        """
        self.chat = chat
        self.sampling = SamplingConfig(max_tokens=longest)
        self._samplers = samplers
        self.servers = Metered(samplers, key)
        """The calls of the request, with the tokens that they used."""
        self._reserve = reserve
        self._adapter = adapter
        self._longest = longest
        self._affinity = f"chat.{secrets.token_hex(8)}"
        self._turns = self._calls = 0
        self._template_kwargs = dict(chat.template_kwargs)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        """See `environments.base.Model`. Raises `ValueError` for a prompt that is too long, and as `Samplers.sample`."""
        prompt = np.asarray(prompt_ids, np.int32)
        room = self._longest - len(prompt)
        if not len(prompt) or room < 1:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens; with a completion the length may be {self._longest}"
            )
        given = sampling.model_dump(exclude={"chat_template_kwargs"}, exclude_none=True) if sampling is not None else {}
        if sampling is not None and sampling.chat_template_kwargs is not None:
            self._template_kwargs = sampling.chat_template_kwargs
        whole = self.sampling.model_dump(include=set(SAMPLED)) | given
        parameters = SamplingParameters(
            **whole | {"max_tokens": min(room, whole["max_tokens"]), "stop_token_ids": self.chat.stop_token_ids}
        )
        self._turns += 1
        asked = (prompt, parameters, f"{self._affinity}-{self._turns}")
        try:
            with self._reserve(len(prompt) + parameters.max_tokens):
                return (await self.servers.turns(self._adapter, [asked]))[0]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        """See `environments.base.Model`."""
        kwargs: dict[str, Any] = self._template_kwargs
        parser = self._samplers.parser
        return await parsed_turn(parser, self.chat, turn, tools, kwargs, self._new_call_id, reasoning=reasoning)

    def _new_call_id(self) -> str:
        self._calls += 1
        return f"call_{self._affinity[-8:]}_{self._calls}"
