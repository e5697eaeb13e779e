"""`tools`: rows of data, a prompt template, tools and a rubric, all from a configuration file.

It is `single-turn` (`counterpoint/environments/rewards/single_turn.py`), whose keys it has, but that the model may call tools
before it answers. The rubric scores the text of the last turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterpoint.environments.base import EnvironmentContext, Example, Model
from counterpoint.environments.rewards.single_turn import SingleTurn
from counterpoint.environments.tools.play import ToolLimits, play_with_tools, tool_metrics
from counterpoint.environments.tools.toolbox import Toolbox
from counterpoint.transport.records import Rollout


class RowsWithTools(SingleTurn):
    """Asks for the answer to one row of `rows`; the model may call tools."""

    needs_tool_parser = True
    reward_bounds = SingleTurn.reward_bounds

    def __init__(
        self,
        tools: Sequence[str | dict[str, Any]],
        max_turns: int = 10,
        call_seconds: float = 60.0,
        observation_characters: int = 8192,
        **single_turn: Any,
    ) -> None:
        """`tools` are those of `Toolbox`; `single_turn` are the arguments of `SingleTurn`. Raises `ValueError`."""
        super().__init__(**single_turn)
        self.state_keys = None  # a tool may put in its own
        self._toolbox = Toolbox(tools)
        self._limits = ToolLimits(max_turns, call_seconds, observation_characters)

    async def start(self, context: EnvironmentContext) -> None:
        """See `Environment`."""
        await super().start(context)
        await self._toolbox.start(context.directory)

    async def close(self) -> None:
        """See `Environment`."""
        try:
            await self._toolbox.close()
        finally:
            await super().close()

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """See `Environment`."""
        async with self._toolbox.for_rollout() as tools:
            reply = await play_with_tools(model, self._messages(example), tools, state, self._limits)
        state["completion"] = "" if reply.calls or reply.malformed else reply.content

    async def score(self, example: Example, rollout: Rollout) -> float:
        """Returns the rubric's total. The metrics have its parts, and the counts of the tools."""
        reward = await super().score(example, rollout)
        rollout.metrics = {**rollout.metrics, **tool_metrics(rollout.state)}
        return reward
