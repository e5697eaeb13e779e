"""What an environment is: a dataset of examples, a rollout over turns, and a score.

An environment is a class; one instance serves all rollouts of a run, so it keeps no state of a rollout in itself. Its
methods run on the orchestrator's event loop and must not block it: anything slow goes to `asyncio.to_thread`. See
`docs/environments.md` for how to write one.
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
    """What a rollout may ask of the policy. One instance a rollout; it records every turn in order."""

    chat: Chat
    """Renders and extends conversations as token ids; never re-tokenizes what the model wrote."""

    async def generate(self, prompt_ids: Sequence[int]) -> Turn:
        """One model call with the run's sampling parameters, appended to the rollout's turns."""


class Environment(Protocol):
    """The protocol. Subclassing is not needed; `environments.registry` checks the shape when it loads one."""

    group_scoring: bool
    """False: `score` is called per rollout. True: `score_group` is called with a group's completed rollouts, and one
    failure drops the whole group."""

    def __len__(self) -> int:
        """Number of examples."""

    def example(self, index: int) -> Example:
        """The example at `index`, the same every time."""

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """Plays the example to its end by calling `model.generate`.

        What it puts into `state` (JSON-serialisable) is kept with the rollout, for scoring and for the saved records. An
        exception costs this rollout only.
        """

    async def score(self, example: Example, rollout: Rollout) -> float:
        """The reward of one finished rollout."""

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[float]:
        """The rewards of a group's finished rollouts, in order."""
