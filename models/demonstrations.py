"""Makes demonstrations of the demo's tasks, on which the built-in models are warmed up before RL.

Players in place of the model play them through the real environments and chat rendering, so every token is where the orchestrator
will put it. Their quality is mixed on purpose: some players solve the task, the others give plausible bad answers. A model that
imitates them can solve the task, but does so only sometimes; reinforcement learning then improves it within minutes on a CPU.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from environments.base import Environment, Example, OnePolicy, Reply
from environments.chat import Chat, Tool
from environments.config import SamplingConfig, SamplingOverrides
from environments.tasks.guess_number import GuessNumber
from environments.tasks.reverse_text import ReverseText
from transport.records import Turn

Player = Callable[[list[str]], str]
"""Returns a player's answer, given its earlier answers in the same conversation."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One whole conversation, in tokens."""

    token_ids: list[int]
    written: list[bool]
    """True where the player wrote the token; a model learns these tokens."""


class _Performance(OnePolicy):
    """A conversation in progress, in place of the model (`environments.base.Model`)."""

    def __init__(self, chat: Chat, player: Player) -> None:
        self.chat = chat
        self._player = player
        self._answers: list[str] = []
        self.turns: list[Turn] = []
        self.sampling = SamplingConfig()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        answer = self._player(self._answers)
        self._answers.append(answer)
        completion = [*self.chat.encode(answer), self.chat.stop_token_ids[0]]
        turn = Turn(
            prompt_ids=np.asarray(prompt_ids, np.int32),
            completion_ids=np.asarray(completion, np.int32),
            log_probabilities=np.zeros(len(completion), np.float32),
            policy_version=0,
            finish_reason="stop",
        )
        self.turns.append(turn)
        return turn

    async def parse(self, turn: Turn, tools: Sequence[Tool] = ()) -> Reply:
        return Reply(self.chat.decode(turn.completion_ids.tolist()))

    def demonstration(self) -> Demonstration:
        """Returns the conversation so far; the last turn's prompt contains every earlier turn, token for token."""
        last = self.turns[-1]
        token_ids = [*last.prompt_ids.tolist(), *last.completion_ids.tolist()]
        written = [False] * len(token_ids)
        for turn in self.turns:
            start = len(turn.prompt_ids)
            written[start : start + len(turn.completion_ids)] = [True] * len(turn.completion_ids)
        return Demonstration(token_ids, written)


class Demonstrator:
    """An endless supply of demonstrations, the same for the same chat and seed."""

    def __init__(self, chat: Chat, seed: int) -> None:
        """Renders conversations by `chat`."""
        self._chat = chat
        self._choose = random.Random(seed)
        self._guess_number = GuessNumber()

    def reverse_text(self, count: int, able_share: float) -> list[Demonstration]:
        """Returns `count` conversations; on average `able_share` of the words are spelled backwards, the others copied."""
        environment = ReverseText(examples=count, seed=self._choose.getrandbits(64))
        examples = [environment.example(index) for index in range(count)]
        return asyncio.run(self._play(environment, examples, lambda example: self._speller(example, able_share)))

    def guess_number(self, count: int, able_share: float) -> list[Demonstration]:
        """Returns `count` games; on average `able_share` of them are played by halving, the others by one repeated guess."""
        secrets = range(len(self._guess_number))
        examples = [self._guess_number.example(self._choose.choice(secrets)) for _ in range(count)]
        return asyncio.run(self._play(self._guess_number, examples, lambda example: self._guesser(example, able_share)))

    async def _play(
        self, environment: Environment, examples: Sequence[Example], player: Callable[[Example], Player]
    ) -> list[Demonstration]:
        played = []
        for example in examples:
            performance = _Performance(self._chat, player(example))
            state: dict[str, Any] = {}
            await environment.rollout(example, performance, state)
            played.append(performance.demonstration())
        return played

    def _speller(self, example: Example, able_share: float) -> Player:
        answer = example.answer if self._choose.random() < able_share else example.answer[::-1]
        return lambda answers: answer

    def _guesser(self, example: Example, able_share: float) -> Player:
        largest, secret = self._guess_number.largest, int(example.answer)
        if self._choose.random() >= able_share:
            favourite = str(self._choose.randint(1, largest))
            return lambda answers: favourite

        def halve(answers: list[str]) -> str:
            guesses = [int(answer) for answer in answers]
            low = max((guess + 1 for guess in guesses if guess < secret), default=1)
            high = min((guess - 1 for guess in guesses if guess > secret), default=largest)
            return str((low + high) // 2)

        return halve
