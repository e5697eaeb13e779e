"""Demonstrations of the demo's tasks, on which `make_model` warms up the built-in models before any RL.

They are played through the real environments and the real chat rendering by players that stand in for the model, so that every
token is where the orchestrator will put it. Their quality is mixed on purpose: some players solve the task, the rest give
plausible bad answers. A model that imitates them is able, but only sometimes does what it is able to; that is the state in
which reinforcement learning has something to sharpen, within minutes on a CPU.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from environments.base import Environment, Example
from environments.chat import Chat
from environments.guess_number import GuessNumber
from environments.reverse_text import ReverseText
from transport.records import Turn

Player = Callable[[list[str]], str]
"""What a player answers, given its earlier answers in the same conversation."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One whole conversation, in tokens."""

    token_ids: list[int]
    written: list[bool]
    """True where the player wrote the token: where a model learns from it."""


class _Performance:
    """A conversation in progress: what an environment takes for the model (`environments.base.Model`)."""

    def __init__(self, chat: Chat, player: Player) -> None:
        self.chat = chat
        self._player = player
        self._answers: list[str] = []
        self.turns: list[Turn] = []

    async def generate(self, prompt_ids: Sequence[int]) -> Turn:
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

    def demonstration(self) -> Demonstration:
        """The conversation so far; the last turn's prompt holds every earlier one, token for token."""
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
        self._chat = chat
        self._choose = random.Random(seed)
        self._guess_number = GuessNumber()

    def reverse_text(self, count: int, able_share: float) -> list[Demonstration]:
        """`count` conversations about words of which `able_share` on average are spelled backwards; the others are copied."""
        environment = ReverseText(examples=count, seed=self._choose.getrandbits(64))
        examples = [environment.example(index) for index in range(count)]
        return asyncio.run(self._play(environment, examples, lambda example: self._speller(example, able_share)))

    def guess_number(self, count: int, able_share: float) -> list[Demonstration]:
        """`count` games of which `able_share` on average are played by halving; in the others one guess is insisted on."""
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
