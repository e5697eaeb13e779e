"""The protocol of an environment: a dataset of examples, a rollout over turns, and a score.

An environment is a class; one instance serves all rollouts of a run, so it keeps no state of a rollout in itself. Its
methods run on the orchestrator's event loop and must not block it: anything slow goes to `asyncio.to_thread`.
`docs/environments.md` explains how to write one.

Next in the reading order of `docs/architecture.md`: `counterpoint/run/config.py`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from counterpoint.environments.reward import Reward
from counterpoint.environments.sampling import SamplingConfig, SamplingOverrides
from counterpoint.transport.printable import shortened
from counterpoint.transport.records import Rollout, Turn

if TYPE_CHECKING:  # who only knows an error of this module needs neither jinja2 nor tokenizers
    from counterpoint.environments.chat import Chat, Tool


@dataclass(frozen=True, slots=True)
class Example:
    """One task instance of a dataset."""

    index: int
    prompt: str
    answer: str = ""
    info: dict[str, Any] = field(default_factory=dict)


LONGEST_ANSWER = 2000
"""Characters of a right answer in a rollout's record."""


class _Beginning(reprlib.Repr):
    """Writes a value as `repr` does, and no more of it than is recorded: it is written on the loop, for each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 50
        self.maxstring = self.maxother = self.maxlong = self._left = LONGEST_ANSWER

    def repr1(self, x: Any, level: int) -> str:
        if self._left <= 0:
            return self.fillvalue
        before = self._left
        text = super().repr1(x[:LONGEST_ANSWER] if isinstance(x, bytes | bytearray) else x, level)
        self._left = min(self._left, before - len(text))
        return text


def answer_of(example: Example) -> str | None:
    """Returns the right answer of an example for people: what it has, which may be no text, cut where it is long.

    None if it has none. Never raises.
    """
    try:
        answer: object = getattr(example, "answer", None)
        text = answer if isinstance(answer, str) else "" if answer is None else _Beginning().repr(answer)
        # Lone surrogates are not UTF-8: JSON and msgpack refuse them.
        safe = text[: LONGEST_ANSWER + 1].encode(errors="backslashreplace").decode()
    except Exception as error:  # noqa: BLE001 - it is foreign code; no rollout fails for it
        return f"(it cannot be shown: {type(error).__name__})"
    return shortened(safe, LONGEST_ANSWER) or None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model wrote."""

    id: str
    """Unique in the rollout."""
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a turn says, as text and calls of tools."""

    content: str
    """Its text, without the calls and the reasoning."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""
    """What is wrong with the calls, for the model to read; empty if nothing is. `calls` are nevertheless made: those that were
    complete when the turn was cut."""


@dataclass(frozen=True, slots=True)
class EnvironmentContext:
    """Where an environment runs. `start` receives it."""

    name: str
    """The environment's name in the run."""
    directory: Path
    """A directory of its own, below that of the run. It may not exist yet."""
    model: Path
    """The model's directory, with tokenizer and chat template."""
    seed: int
    """The seed of the run."""
    own_process: bool = False
    """Whether it has a process of its own, so that its code may hold up the loop, and set signal handlers."""


class Model(Protocol):
    """The policy, as a rollout uses it. One instance a rollout; it records every turn in order."""

    chat: Chat
    """Renders and extends conversations as token ids; never re-tokenizes a completion."""

    @property
    def sampling(self) -> SamplingConfig:
        """How a call is sampled that overrides nothing: the run's `[sampling]` with the environment's."""

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        """Makes one model call and appends it to the rollout's turns.

        `sampling` overrides the environment's sampling parameters. Every token of the completion is trained, unless
        `Turn.leave_untrained` excludes it, here or while the rollout or its group is scored. The model itself excludes
        a call that `CallOverrides.json_schema` constrains. Its `chat_template_kwargs` say how the prompt was rendered, and so how
        `parse` is to read the turn; they are all of the prompt's.
        """

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        """Returns what a turn says. Calls of `tools` are parsed as the model's template writes them.

        Without tools the content is the whole text; with `reasoning` it is then, too, without the reasoning, if the servers
        parse that (`reasoning_parser`).
        """

    def reward(self, value: float, turn: int | Turn | None = None) -> None:
        """Gives a turn its reward, at any time before the rollout ends, once for a turn.

        `turn` is its number in `rollout.turns`, from 0, or what `generate` returned; by default the turn that was played last,
        of a player the player's last. The rollout's reward is then the sum of its turns', which `score` returns or leaves to
        `Reward()`. Raises `ValueError` for a reward that is no finite number, a turn that is not there or is another player's,
        and a second reward of a turn; `RuntimeError` once the rollout has ended.
        """

    def player(self, name: str) -> Model:
        """Returns the same policy as one of several players: its turns get that player's reward."""

    def opponent(self, name: str) -> Model:
        """Returns another policy, of `[opponents.NAME]`. Its turns are recorded, and neither trained nor counted."""


class OnePolicy:
    """The part of a `Model` that has no players, no opponents and no rewards."""

    def reward(self, value: float, turn: int | Turn | None = None) -> None:
        """Raises `ValueError`."""
        raise ValueError("this model takes no rewards: it plays no rollout that is scored")

    def player(self, name: str) -> Model:
        """Raises `ValueError`."""
        raise ValueError(f"this model has no players; {name!r} cannot be one")

    def opponent(self, name: str) -> Model:
        """Raises `ValueError`."""
        raise ValueError(f"there is no opponent {name!r}: this model plays alone")


Score = float | Mapping[str, float] | Reward
"""The reward of a rollout, that of each of its players by name, or the rewards of its turns."""


class Unavailable(Exception):
    """What an environment needs from elsewhere is not there, such as a service that it plays with.

    Raised in `rollout` or `score`, it fails the rollout as one that inference failed: not as its environment's failure.
    """


class WorkerError(RuntimeError):
    """What failed in a worker, or ended it, for a person. The text is complete: the place that raised it says nothing."""


class UnavailableError(WorkerError, Unavailable):
    """The environment raised `Unavailable` in its worker."""


class Environment(Protocol):
    """The protocol. Subclassing is not needed.

    `environments.registry` checks a class when it loads it. An environment may have a string `fingerprint`, a digest of its
    examples: a run is not resumed with another one. It may have `weights`, a number for each example: how often it is drawn,
    relative to the others; None draws all alike. It may have `state_keys`, all names that it puts into a rollout's `state`:
    `state_columns` may then name no other. It may have `reward_bounds`, the least and the greatest reward that it can give:
    another one fails its rollout, and intervals of the mean reward lie within them. An environment that holds resources
    (processes, sockets) may also have `async def start(self, context: EnvironmentContext)`, called once on the event loop
    before the first rollout, and `async def close(self)`, called after the last one, also if `start` failed.
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

    async def score(self, example: Example, rollout: Rollout) -> Score:
        """Returns the reward of one completed rollout, that of each of its players by name, or the rewards of its turns."""

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """Returns the rewards of a group's completed rollouts, in order."""
