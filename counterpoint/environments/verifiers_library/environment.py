"""`verifiers`: any environment of the verifiers library, played with the policy. See docs/verifiers.md.

A rollout is one episode of the library: the agents of its environment play a task, its own code scores them. This module is the
protocol of our environments; `loading` finds and configures theirs, `playing` plays it. Both need the library, which is imported
when an environment is constructed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from counterpoint.environments.base import EnvironmentContext, Example, Model, Score
from counterpoint.environments.main_thread import uses_signals, without_signals
from counterpoint.environments.verifiers_library.own_loop import OwnLoop, SameLoop
from counterpoint.transport.records import Rollout

if TYPE_CHECKING:
    from counterpoint.environments.verifiers_library.playing import LibraryServing

CLOSE_SECONDS = 20.0
_REMEDY = "set workers = 1 or more for this environment: it then runs in the main thread of processes of its own"


class Verifiers:
    """The environment `id` of the library. `taskset`, `env` and `select` are tables of its own configuration.

    `trained` names the agents whose turns are trained and whose rewards count; by default all that the environment calls
    trainable.
    """

    group_scoring = False
    state_keys = ("agents", "metrics", "reward", "stop")

    def __init__(
        self,
        id: str,
        taskset: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        select: Mapping[str, Any] | None = None,
        trained: Sequence[str] = (),
    ) -> None:
        try:
            import verifiers.v1  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name not in ("verifiers", "verifiers.v1"):
                raise
            raise ValueError(
                'kind = "verifiers" needs the verifiers library, release 0.4 or later: pip install "counterpoint[verifiers]"'
            ) from error
        from counterpoint.environments.verifiers_library import loading

        self._env = loading.load(id, taskset or {}, env or {})
        self._tasks = loading.select(self._env.taskset, select or {})
        self.fingerprint = loading.fingerprint(self._tasks)
        if unknown := set(trained) - set(names := loading.agent_names(self._env)):
            raise ValueError(f"trained: {sorted(unknown)} are no agents of this environment; it has {', '.join(names)}")
        self._trained = frozenset(trained)
        self._loop: OwnLoop | SameLoop | None = None
        self._stage: LibraryServing | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    def example(self, index: int) -> Example:
        """See `Environment`."""
        data = self._tasks[index].data
        answer = getattr(data, "answer", "")
        return Example(
            index, data.prompt_text, answer if isinstance(answer, str) else "", {"name": data.name, "id": data.id}
        )

    async def start(self, context: EnvironmentContext) -> None:
        """Starts what all episodes share: the library's interception server, tool servers of the taskset, the author's own.

        Raises `NeedsMainThread` for an author's code that sets alarms, unless the environment has a process of its own, and
        `ValueError` if a server that the taskset names does not answer.
        """
        from counterpoint.environments.verifiers_library.loading import check_server, server_of
        from counterpoint.environments.verifiers_library.playing import LibraryServing

        if url := server_of(self._env.taskset):
            await check_server(url)
        if context.own_process:
            self._loop = SameLoop()
        else:
            uses_signals(self._classes(), _REMEDY)
            self._loop = OwnLoop(f"verifiers-{context.name}")
        self._stage = LibraryServing(self._env, self._trained)
        await self._loop.run(self._stage.open(context.directory))

    async def close(self) -> None:
        """Ends what `start` started, and the episodes that still play."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        try:
            if self._stage is not None:
                async with asyncio.timeout(CLOSE_SECONDS / 2):
                    await loop.run(self._stage.close())
        finally:
            self._stage = None
            await loop.close(CLOSE_SECONDS / 2)

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """Plays the example's task. Fills `state` with its `reward`, `metrics`, `stop` and `agents`."""
        if self._loop is None or self._stage is None:
            raise RuntimeError("the environment was not started")
        played = self._stage.play(self._tasks[example.index], model, asyncio.get_running_loop())
        with without_signals(_REMEDY):
            state.update(await self._loop.run(played))

    def _classes(self) -> list[type]:
        """Returns the classes of the environment's author. What the library does itself is seen when it asks for signals."""
        parts = [self._env, self._env.taskset, *self._tasks[:1]]
        classes = [each for part in parts for each in type(part).__mro__]
        return [
            each for each in classes if each.__module__.partition(".")[0] not in ("verifiers", *sys.stdlib_module_names)
        ]

    async def score(self, example: Example, rollout: Rollout) -> Score:
        """Returns the reward that the library gave, or that of each trained run.

        Each part of a reward, and each metric, becomes a metric of the rollout.
        """
        rollout.metrics |= rollout.state["metrics"]
        reward: Score = rollout.state["reward"]
        return reward

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """See `Environment`."""
        raise NotImplementedError("an environment of the verifiers library scores each episode by itself")
