"""A base class for environments with tools: it plays the rollout, and counts calls as metrics.

A subclass says what is asked and what it is worth:

    class Sums(ToolEnvironment):
        def __init__(self):
            super().__init__(tools=["calculator"])

        def __len__(self): ...
        def example(self, index): ...

        async def reward(self, example, rollout, answer):
            return float(answer.strip() == example.answer)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from counterpoint.environments.base import EnvironmentContext, Example, Model, Score
from counterpoint.environments.chat import Message
from counterpoint.environments.tools.definition import ToolFunction
from counterpoint.environments.tools.play import ToolLimits, play_with_tools, tool_metrics, with_answer
from counterpoint.environments.tools.toolbox import Toolbox
from counterpoint.transport.records import Rollout


class ToolEnvironment:
    """See `Environment`. A subclass has `__len__`, `example` and `reward`."""

    group_scoring = False
    needs_tool_parser = True

    def __init__(
        self,
        tools: Sequence[str | dict[str, Any] | ToolFunction] = (),
        system_prompt: str = "",
        max_turns: int = 10,
        call_seconds: float = 60.0,
        observation_characters: int = 8192,
    ) -> None:
        """`tools` are those of `Toolbox`, or made by `tool_from`."""
        self._toolbox = Toolbox([tool for tool in tools if not isinstance(tool, ToolFunction)])
        self._functions = [tool for tool in tools if isinstance(tool, ToolFunction)]
        self._system_prompt = system_prompt
        self._limits = ToolLimits(max_turns, call_seconds, observation_characters)

    async def start(self, context: EnvironmentContext) -> None:
        """See `Environment`."""
        await self._toolbox.start(context.directory)

    async def close(self) -> None:
        """See `Environment`."""
        await self._toolbox.close()

    @property
    def tools(self) -> list[ToolFunction]:
        """Returns the tools of every rollout."""
        return [*self._toolbox.tools, *self._functions]

    def messages(self, example: Example) -> list[Message]:
        """Returns the messages that open the conversation."""
        system: list[Message] = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return [*system, {"role": "user", "content": example.prompt}]

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """See `Environment`. The text of the last turn is `state["answer"]`."""
        async with self._toolbox.for_rollout() as tools:
            all_tools = [*tools, *self._functions]
            reply = await play_with_tools(model, self.messages(example), all_tools, state, self._limits)
        state["answer"] = "" if reply.calls or reply.malformed else reply.content

    async def score(self, example: Example, rollout: Rollout) -> Score:
        """See `Environment`."""
        rollout.metrics.update(tool_metrics(rollout.state))
        return with_answer(rollout, await self.reward(example, rollout, rollout.state["answer"]))

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """See `Environment`."""
        raise NotImplementedError("an environment with tools scores each rollout by itself")

    async def reward(self, example: Example, rollout: Rollout, answer: str) -> float:
        """Returns the reward. `answer` is the last turn's text, empty where that still called a tool.

        If tools gave turns rewards (`ToolResult`), it is the last turn's, and the rollout's is the sum.
        """
        raise NotImplementedError
