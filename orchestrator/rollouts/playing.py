"""Plays a run's rollouts with their environments, chat templates, the policy's servers, opponents, a teacher, and traces."""

from __future__ import annotations

from collections.abc import Mapping

from counterpoint.environments.chat import Chat
from counterpoint.inference.base import SamplingParameters
from counterpoint.orchestrator.rollouts.play import LoadedEnvironment, PolicyModel, play, sampling_parameters
from counterpoint.orchestrator.rollouts.players import GroupsPool
from counterpoint.orchestrator.teacher import Teacher
from counterpoint.run.config import RunConfig
from counterpoint.transport.records import Rollout


class Playing:
    """Plays the rollouts of one run."""

    def __init__(
        self,
        config: RunConfig,
        environments: Mapping[str, LoadedEnvironment],
        chats: Mapping[str, Chat],
        pool: GroupsPool,
    ) -> None:
        self.environments = environments
        self._pool = pool
        self.opponents: Mapping[str, GroupsPool] = {}
        """Other policies by name, set before the first rollout."""
        self.teacher: Teacher | None = None
        """Asked about each completed rollout, and set with the opponents."""
        self._calling: dict[str, tuple[Chat, SamplingParameters]] = {}
        """Chat template and sampling parameters by environment."""
        self.reconfigure(config, chats)

    def reconfigure(self, config: RunConfig, chats: Mapping[str, Chat]) -> None:
        """Uses this configuration for rollouts that begin from now on."""
        for environment in config.environments:
            chat = chats[environment.name]
            self._calling[environment.name] = chat, sampling_parameters(config.sampling_of(environment), chat)

    async def play(self, rollout: Rollout) -> None:
        """Plays a rollout to its end, and asks the teacher about it. An error of the environment is in `rollout.error`."""
        chat, sampling = self._calling[rollout.environment]
        model = PolicyModel(rollout, chat, self._pool, sampling, self.opponents)
        await play(self.environments[rollout.environment], rollout, model)
        if self.teacher is not None and rollout.error is None:
            await self.teacher.ask(rollout)

    def forget_group(self, rollout: Rollout) -> None:
        """Forgets the servers of a rollout's group, once all of the group have ended."""
        for pool in (self._pool, *self.opponents.values()):
            pool.forget_group(rollout.rollout_id)
        if self.teacher is not None:
            self.teacher.forget_group(rollout)
