"""`single-turn`: a dataset, a prompt template and a rubric, all from a configuration file. One turn an attempt.

The rows come from `environments.data`; the rubric from `rubric.py`. A row is an example: its columns fill the template, one of
them is the answer, and all of them are the example's `info`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from counterpoint.environments.base import EnvironmentContext, Example, Model
from counterpoint.environments.data.load import load_rows
from counterpoint.environments.data.rows import lacks
from counterpoint.environments.reward import RewardBounds
from counterpoint.environments.rewards.rubric import Rubric
from counterpoint.environments.rewards.template import Template
from counterpoint.transport.records import Rollout


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
            prompt: Template of the user's message: `{column}` is the row's value, `{{` and `}}` are braces.
            answer: The column of the answer; empty if the rubric needs none.
            answer_pattern: What of that column is the answer: the first group of this expression's last match, or else the match.
            system: Template of a system message.
            processes: How many processes work on hostile completions at once.

        Raises:
            ValueError: The first row lacks a column, or its answer is no text and no number; something else is wrong with a key.
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
        self._messages(self.example(0))  # a wrong column is an error at the start

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
        return Example(
            index=index,
            prompt=self._prompt.fill(row, self._rows.where(index)),
            answer=self._answer_of(row, index),
            info=row,
        )

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

    async def score(self, example: Example, rollout: Rollout) -> float:
        """Returns the rubric's total. The rollout's metrics have it, too, and each part."""
        scored = await self._rubric.score(example, rollout.state["completion"], rollout.state)
        rollout.metrics = {**rollout.metrics, **scored.metrics}
        return scored.reward

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """See `Environment`."""
        raise NotImplementedError("single-turn scores each rollout by itself")

    def _messages(self, example: Example) -> list[dict[str, str]]:
        messages = [{"role": "user", "content": example.prompt}]
        if self._system is not None:
            system = self._system.fill(example.info, self._rows.where(example.index))
            messages.insert(0, {"role": "system", "content": system})
        return messages

    def _answer_of(self, row: Mapping[str, Any], index: int) -> str:
        if not self._answer:
            return ""
        where = self._rows.where(index)
        if self._answer not in row:
            raise ValueError(f"{where}: {lacks(self._answer, list(row))} (`answer`, which may be empty)")
        value = row[self._answer]
        if not isinstance(value, str | int | float | Decimal) or value != value:
            found = "NaN" if isinstance(value, float | Decimal) else type(value).__name__
            raise ValueError(f"{where}: {self._answer!r} (`answer`) is {found}; expected text or a number")
        text = f"{value:f}" if isinstance(value, Decimal) else str(value)
        if self._answer_pattern is None:
            return text
        matches = list(self._answer_pattern.finditer(text))
        if not matches:
            raise ValueError(f"{where}: answer_pattern finds nothing in {text[-100:]!r}")
        return (matches[-1][1] or "") if matches[-1].re.groups else matches[-1][0]
