"""`tools`: rows of data, a prompt template, tools and a rubric, all from a configuration file.

It is `single-turn` (`counterpoint/environments/rewards/single_turn.py`), whose keys it has, but that the model may call tools
before it answers. The rubric scores the text of the last turn, and `turn_rubric` that of each turn before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from counterpoint.environments.base import EnvironmentContext, Example, Model, Score
from counterpoint.environments.reward import RewardBounds
from counterpoint.environments.rewards.rubric import Rubric
from counterpoint.environments.rewards.single_turn import SingleTurn
from counterpoint.environments.tools.play import ToolLimits, play_with_tools, tool_metrics, with_answer
from counterpoint.environments.tools.toolbox import Toolbox
from counterpoint.transport.records import Rollout


class RowsWithTools(SingleTurn):
    """Asks for the answer to one row of `rows`; the model may call tools."""

    needs_tool_parser = True

    def __init__(
        self,
        tools: Sequence[str | dict[str, Any]],
        max_turns: int = 10,
        call_seconds: float = 60.0,
        observation_characters: int = 8192,
        turn_rubric: Sequence[Mapping[str, Any]] | None = None,
        **single_turn: Any,
    ) -> None:
        """`tools` are those of `Toolbox`; `single_turn` are the arguments of `SingleTurn`. Raises `ValueError`.

        `turn_rubric` has parts as `rubric`, whose sum is the reward of each turn that is not the last. They are given the turn's
        whole text, calls and reasoning included.
        """
        super().__init__(**single_turn)
        self._turn_rubric: Rubric | None = None
        if turn_rubric is not None:
            self._turn_rubric = Rubric(turn_rubric, single_turn.get("processes", 2))
            self._turn_rubric.require_columns(self.example(0).info, f"{self._rows.where(0)}: turn_rubric")
        self.state_keys = None  # a tool may put in its own
        self._toolbox = Toolbox(tools)
        self._limits = ToolLimits(max_turns, call_seconds, observation_characters)

    @property
    def reward_bounds(self) -> RewardBounds | None:
        """See `Environment`. None where turns may have rewards of their own: the number of turns is not known."""
        return None if self._toolbox.may_reward or self._turn_rubric is not None else super().reward_bounds

    async def start(self, context: EnvironmentContext) -> None:
        """See `Environment`."""
        await super().start(context)
        if self._turn_rubric is not None:
            await self._turn_rubric.start(context)
        await self._toolbox.start(context.directory)

    async def close(self) -> None:
        """See `Environment`."""
        async with AsyncExitStack() as stack:  # which calls all, whatever one of them raises
            stack.push_async_callback(super().close)
            if self._turn_rubric is not None:
                stack.push_async_callback(self._turn_rubric.close)
            stack.push_async_callback(self._toolbox.close)

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """See `Environment`."""
        seen: dict[str, list[float]] = {}

        async def turn_reward(text: str) -> float:
            assert self._turn_rubric is not None
            scored = await self._turn_rubric.score(example, text, state)
            for name, value in scored.metrics.items():
                seen.setdefault(name, []).append(value)
            return scored.reward

        of_turn = None if self._turn_rubric is None else turn_reward
        async with self._toolbox.for_rollout() as tools:
            reply = await play_with_tools(model, self._messages(example), tools, state, self._limits, of_turn)
        if seen:
            state["turn_rubric"] = {name: math.fsum(values) / len(values) for name, values in seen.items()}
        state["completion"] = "" if reply.calls or reply.malformed else reply.content

    async def score(self, example: Example, rollout: Rollout) -> Score:
        """Returns the rubric's total, and the rewards of earlier turns, if they have any.

        The metrics have its parts, the means of those of `turn_rubric`, and the counts of the tools.
        """
        reward = await self._score_answer(example, rollout)
        of_turns = {f"turns/{name}": value for name, value in rollout.state.get("turn_rubric", {}).items()}
        rollout.metrics = {**rollout.metrics, **of_turns, **tool_metrics(rollout.state)}
        return with_answer(rollout, reward)
