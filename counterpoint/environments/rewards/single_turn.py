"""`single-turn`: a dataset, a prompt template and a rubric, all from a configuration file. One turn an attempt.

The rows come from `environments.data`; the rubric from `rubric.py`. A row is an example: its columns fill the template, one of
them is the answer, and all of them are the example's `info`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from counterpoint.environments.base import EnvironmentContext, Example, Model, Score
from counterpoint.environments.chat import Message
from counterpoint.environments.data.load import load_rows
from counterpoint.environments.data.rows import lacks, unwritable
from counterpoint.environments.messages import Faulty, Normaliser, json_of
from counterpoint.environments.reward import RewardBounds
from counterpoint.environments.rewards.rubric import Rubric
from counterpoint.environments.rewards.template import Template, as_text
from counterpoint.transport.records import Rollout

_ROLES = {"role", "from"}
"""What a message says its author by; of these, only the first is read."""


class SingleTurn:
    """Asks for one completion a row of `rows` and scores it by a rubric."""

    group_scoring = False

    def __init__(
        self,
        data: Mapping[str, Any],
        rubric: Sequence[Mapping[str, Any]],
        prompt: str = "{question}",
        answer: str = "answer",
        answer_pattern: str | None = None,
        system: str | None = None,
        processes: int = 2,
    ) -> None:
        """Builds the examples.

        Args:
            data: Where the rows come from; see docs/data.md.
            rubric: The parts of the reward; see docs/rewards.md.
            prompt: Template of the user's message: `{column}` is the row's value, `{{` and `}}` are braces. One column alone
                may be a list of messages, which are the conversation then.
            answer: The column of the answer; empty if the rubric needs none.
            answer_pattern: What of that column is the answer: the first group of this expression's last match, or else the match.
            system: Template of a system message.
            processes: How many processes work on hostile completions at once.

        Raises:
            ValueError: The first row lacks a column, also one of the rubric's, or its answer is a list or the like; something
                else is wrong with a key.
        """
        self._rows = load_rows(data)
        self.fingerprint = self._rows.fingerprint
        self.weights = self._rows.weights
        self._prompt = Template(prompt, "prompt")
        self._system = None if system is None else Template(system, "system")
        self._answer = answer
        self._answer_pattern = None if answer_pattern is None else re.compile(answer_pattern)
        self._rubric = Rubric(rubric, processes)
        own = self._rubric.state_keys
        self.state_keys: tuple[str, ...] | None = None if own is None else ("completion", *own)
        first = self.example(0)
        self._messages(first)  # a wrong column is an error at the start
        self._rubric.require_columns(first.info, self._rows.where(0))

    @property
    def reward_bounds(self) -> RewardBounds | None:
        """See `Environment`."""
        return self._rubric.reward_bounds

    def __len__(self) -> int:
        return len(self._rows)

    def example(self, index: int) -> Example:
        """See `Environment`."""
        if not 0 <= index < len(self._rows):
            raise IndexError(f"example {index}: expected 0 to {len(self._rows) - 1}")
        row = dict(self._rows[index])
        where = self._rows.where(index)
        messages = self._written_messages(row, where)
        if not messages:
            prompt = self._prompt.fill(row, where)
        elif [each["role"] for each in messages] == ["user"]:
            prompt = messages[0]["content"]
        else:
            prompt = as_text(messages)
        return Example(index=index, prompt=prompt, answer=self._answer_of(row, index), info=row)

    async def start(self, context: EnvironmentContext) -> None:
        """See `Environment`."""
        await self._rubric.start(context)

    async def close(self) -> None:
        """See `Environment`."""
        await self._rubric.close()

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """See `Environment`."""
        turn = await model.generate(model.chat.start(self._messages(example)))
        reply = await model.parse(turn)
        state["completion"] = reply.content

    async def score(self, example: Example, rollout: Rollout) -> Score:
        """Returns the rubric's total. The rollout's metrics have it, too, and each part."""
        return await self._score_answer(example, rollout)

    async def _score_answer(self, example: Example, rollout: Rollout) -> float:
        scored = await self._rubric.score(example, rollout.state["completion"], rollout.state)
        rollout.metrics = {**rollout.metrics, **scored.metrics}
        return scored.reward

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """See `Environment`."""
        raise NotImplementedError("single-turn scores each rollout by itself")

    def _messages(self, example: Example) -> list[Message]:
        where = self._rows.where(example.index)
        messages = self._written_messages(example.info, where) or [{"role": "user", "content": example.prompt}]
        if self._system is None:
            return messages
        if any(each["role"] == "system" for each in messages):
            raise ValueError(
                f"{where}: the column {self._prompt.only!r} has a system message, and `system` is another one"
            )
        return [{"role": "system", "content": self._system.fill(example.info, where)}, *messages]

    def _written_messages(self, row: Mapping[str, Any], where: str) -> list[Message]:
        """Returns the conversation that a row's prompt is; empty if it is text. Raises `ValueError`."""
        fields = self._prompt.fields | (self._system.fields if self._system else set())
        for column in sorted(fields & row.keys()):
            value = row[column]
            is_whole = column == self._prompt.only
            if is_whole and isinstance(value, str) and value.lstrip().startswith("["):
                value = json_of(value)  # as CSV, and some columns of Parquet, have a conversation
            if not isinstance(value, list) or not any(map(_is_message, value)):
                if is_whole and _holds_messages(row[column]):
                    raise ValueError(
                        f"{where}: the column {column!r} holds messages, and is no list of them; expected such a list, or text"
                    )
                continue
            at = f"{where}: the column {column!r}, a list of messages,"
            if column != self._prompt.only:
                raise ValueError(
                    f'{at} can be no part of a text; set prompt = "{{{column}}}", and leave it out of `system`'
                )
            try:
                messages = Normaliser(is_row=True).messages(value)
            except Faulty as error:
                raise ValueError(f"{at} cannot be played: {error}") from None
            if messages[-1]["role"] == "assistant":
                raise ValueError(f"{at} ends with the assistant's; expected a message that the model answers")
            return [{name: each[name] for name in each if name != "weight"} for each in messages]
        return []

    def _answer_of(self, row: Mapping[str, Any], index: int) -> str:
        if not self._answer:
            return ""
        where = self._rows.where(index)
        if self._answer not in row:
            raise ValueError(f"{where}: {lacks(self._answer, list(row))} (`answer`, which may be empty)")
        value = row[self._answer]
        found = unwritable(value) or ("" if isinstance(value, str | int | float) else type(value).__name__)
        if found:
            raise ValueError(f"{where}: {self._answer!r} (`answer`) is {found}; expected text, a number, true or false")
        text = as_text(value)
        if self._answer_pattern is None:
            return text
        matches = list(self._answer_pattern.finditer(text))
        if not matches:
            raise ValueError(f"{where}: answer_pattern finds nothing in {text[-100:]!r}")
        return (matches[-1][1] or "") if matches[-1].re.groups else matches[-1][0]


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and bool(value.keys() & _ROLES)


def _holds_messages(value: object) -> bool:
    """Whether a value is a message, or has one in it; or is an empty list, a conversation without any."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (
        value == []
        or (isinstance(value, dict) and {"role", "content"} <= value.keys())
        or any(map(_holds_messages, inner))
    )
