"""An environment that hosts episodes for another run, and lets the base model speak, too (`test_seats.py`)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from counterpoint.environments.base import EnvironmentContext, Example, Model
from counterpoint.environments.seats.table import Table
from counterpoint.transport.records import Rollout


class Debate:
    """The policy speaks, then the base model under it, then the other run's policy. Rewards differ from rollout to rollout."""

    group_scoring = False

    def __init__(self) -> None:
        self._table = Table(seats=("opposite",))

    async def start(self, context: EnvironmentContext) -> None:
        await self._table.open(context)

    async def close(self) -> None:
        await self._table.close()

    def __len__(self) -> int:
        return 40

    def example(self, index: int) -> Example:
        return Example(index, f"{index} + {index}")

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        async with self._table.episode(example.index) as episode:
            question = model.chat.start([{"role": "user", "content": example.prompt}])
            turn = await model.generate(question)
            base = await model.opponent("base").generate(question)
            said = [(await model.parse(each)).content for each in (turn, base)]
            text = await episode.ask("opposite", [{"role": "user", "content": " ".join(said)}])
            await model.generate(model.chat.extend(turn, [{"role": "user", "content": text}]))
            state["text"] = text
            episode.reward("opposite", _chance(text + said[0]))

    async def score(self, example: Example, rollout: Rollout) -> float:
        return _chance(rollout.rollout_id)

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        raise NotImplementedError


def _chance(text: str) -> float:
    return hashlib.sha256(text.encode()).digest()[0] / 255
