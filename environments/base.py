"""The protocol of an environment: a dataset of examples, a rollout over turns, and a score.

An environment is a class; one instance serves all rollouts of a run, so it keeps no state of a rollout in itself. Its
methods run on the orchestrator's event loop and must not block it: anything slow goes to `asyncio.to_thread`.
`docs/environments.md` explains how to write one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from environments.chat import Chat
from transport.records import Rollout, Turn


@dataclass(frozen=True, slots=True)
class Example:
    """One task instance of a dataset."""

    index: int
    prompt: str
    answer: str = ""
    info: dict[str, Any] = field(default_factory=dict)


class Model(Protocol):
    """The policy, as a rollout uses it. One instance a rollout; it records every turn in order."""

    chat: Chat
    """Renders and extends conversations as token ids; never re-tokenizes a completion."""

    async def generate(self, prompt_ids: Sequence[int]) -> Turn:
        """Makes one model call with the run's sampling parameters, and appends it to the rollout's turns."""


class Environment(Protocol):
    """The protocol. Subclassing is not needed.

    `environments.registry` checks a class when it loads it.
    """

    group_scoring: bool
    """False: `score` is called per rollout. True: `score_group` is called with a group's completed rollouts, and one
    failure drops the whole group."""

    def __len__(self) -> int:
        """Returns the number of examples."""

    def example(self, index: int) -> Example:
        """Returns the example at `index`, the same every time."""

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """Runs the example to its end by calling `model.generate`.

        The keys of `state` (JSON-serialisable) are kept with the rollout, for scoring and for the saved records. An
        exception fails this rollout only.
        """

    async def score(self, example: Example, rollout: Rollout) -> float:
        """Returns the reward of one completed rollout."""

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """Returns the rewards of a group's completed rollouts, in order."""
