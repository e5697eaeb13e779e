"""Makes demonstrations of the demos' tasks, on which the built-in models are warmed up before RL.

Players in place of the model play them through the real environments and chat rendering, so every token is where the orchestrator
will put it. Their quality is mixed on purpose: some players solve the task, the others give plausible bad answers. A model that
imitates them can solve the task, but does so only sometimes; reinforcement learning then improves it within minutes on a CPU.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from counterpoint.environments.base import Environment, Example
from counterpoint.environments.chat import Chat
from counterpoint.environments.scripted import ScriptedModel
from counterpoint.environments.tasks.arithmetic import CALCULATOR, OPERATIONS, Arithmetic
from counterpoint.environments.tasks.guess_number import GuessNumber
from counterpoint.environments.tasks.reverse_text import ReverseText
from counterpoint.environments.tools.built_in import calculate
from counterpoint.environments.tools.hermes import write_hermes
from counterpoint.transport.records import Turn

Player = Callable[[list[str]], str]
"""Returns a player's answer, given its earlier answers in the same conversation."""


@dataclass(frozen=True, slots=True)
class TokenizedConversation:
    """One whole conversation, in tokens."""

    token_ids: list[int]
    written: list[bool]
    """True where the player wrote the token; a model learns these tokens."""


def _answers(player: Player) -> Iterator[str]:
    said: list[str] = []
    while True:
        said.append(player(said))
        yield said[-1]


def _demonstration(turns: Sequence[Turn]) -> TokenizedConversation:
    """Returns the conversation of these turns; the last one's prompt contains every earlier turn, token for token."""
    last = turns[-1]
    token_ids = [*last.prompt_ids.tolist(), *last.completion_ids.tolist()]
    written = [False] * len(token_ids)
    for turn in turns:
        start = len(turn.prompt_ids)
        written[start : start + len(turn.completion_ids)] = [True] * len(turn.completion_ids)
    return TokenizedConversation(token_ids, written)


class Demonstrator:
    """An endless supply of demonstrations, the same for the same chat and seed."""

    def __init__(self, chat: Chat, seed: int) -> None:
        """Renders conversations by `chat`."""
        self._chat = chat
        self._choose = random.Random(seed)
        self._guess_number = GuessNumber()

    def reverse_text(self, count: int, able_share: float) -> list[TokenizedConversation]:
        """Returns `count` conversations; on average `able_share` of the words are spelled backwards, the others copied."""
        environment = ReverseText(examples=count, seed=self._choose.getrandbits(64))
        examples = [environment.example(index) for index in range(count)]
        return asyncio.run(self._play(environment, examples, lambda example: self._speller(example, able_share)))

    def guess_number(self, count: int, able_share: float) -> list[TokenizedConversation]:
        """Returns `count` games; on average `able_share` of them are played by halving, the others by one repeated guess."""
        secrets = range(len(self._guess_number))
        examples = [self._guess_number.example(self._choose.choice(secrets)) for _ in range(count)]
        return asyncio.run(self._play(self._guess_number, examples, lambda example: self._guesser(example, able_share)))

    def arithmetic(self, count: int, able_share: float) -> list[TokenizedConversation]:
        """Returns `count` conversations; on average `able_share` of the players calculate what was asked, with the tool.

        Of the others, half guess, and half calculate something else.
        """
        environment = Arithmetic(examples=count, seed=self._choose.getrandbits(64))
        examples = [environment.example(index) for index in range(count)]
        return asyncio.run(self._play(environment, examples, lambda example: self._calculator(example, able_share)))

    async def _play(
        self, environment: Environment, examples: Sequence[Example], player: Callable[[Example], Player]
    ) -> list[TokenizedConversation]:
        played = []
        for example in examples:
            model = ScriptedModel(self._chat, _answers(player(example)))
            await environment.rollout(example, model, {})
            played.append(_demonstration(model.turns))
        return played

    def _speller(self, example: Example, able_share: float) -> Player:
        answer = example.answer if self._choose.random() < able_share else example.answer[::-1]
        return lambda answers: answer

    def _calculator(self, example: Example, able_share: float) -> Player:
        expression = example.prompt.removesuffix("=?")
        if self._choose.random() >= able_share:
            if self._choose.random() < 0.5:
                guess = str(self._choose.randint(10, 9999))
                return lambda answers: guess
            operation = next(sign for sign in OPERATIONS if sign in expression)
            other = self._choose.choice([sign for sign in OPERATIONS if sign != operation])
            expression = expression.replace(operation, other)
        call = write_hermes(CALCULATOR, {"expression": expression})
        return lambda answers: str(calculate(expression)) if answers else call

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
