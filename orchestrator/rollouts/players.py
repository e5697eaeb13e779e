"""Further models of one rollout: the policy as a player with a separate reward, and opponents, which the run does not train.

`play.PolicyModel` makes them (`Model.player`, `Model.opponent`) and keeps their records.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from counterpoint.environments.base import Model, Reply
from counterpoint.environments.chat import Tool
from counterpoint.environments.reward import NO_TURN_OF_OURS
from counterpoint.environments.sampling import SamplingOverrides
from counterpoint.inference.base import SamplingParameters
from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.records import Int32Array, Turn


class GeneratingPool(Protocol):
    """The part of `inference.pool.pool.Served` that a rollout uses."""

    async def generate(
        self, prompt_ids: Int32Array, sampling: SamplingParameters, *, affinity: str, routed_experts_start: int = 0
    ) -> Turn:
        """Returns one completion as a turn. Raises `InferenceError`."""


class GroupsPool(GeneratingPool, Protocol):
    """The part of `inference.pool.pool.Served` for playing whole groups."""

    def forget_group(self, affinity: str) -> None:
        """Notes that all rollouts of a group have ended. `affinity` is that of any of them."""


class RolloutPolicy(Model, Protocol):
    """The part of `play.PolicyModel` that the models of this file use."""

    async def generate_as(self, player: str, prompt_ids: Sequence[int], sampling: SamplingOverrides | None) -> Turn:
        """Does as `generate`, for a player."""

    def reward_as(self, player: str, value: float, turn: int | Turn | None) -> None:
        """Does as `reward`, for a player."""

    async def call(
        self,
        pool: GeneratingPool,
        prompt: Int32Array,
        overrides: SamplingOverrides | None,
        *,
        routed_experts_start: int,
    ) -> Turn:
        """Returns a pool's answer, recording nothing."""

    def note(self, opponent: str, turn: Turn) -> None:
        """Records a call of another policy, for people."""


class PlayerModel:
    """The policy as one player of a rollout: its turns carry the player's name."""

    def __init__(self, policy: RolloutPolicy, name: str) -> None:
        """Raises `ValueError` for a name that no metric could have."""
        if not re.fullmatch(IDENTIFIER_PATTERN, name):
            raise ValueError(f"player {name!r}: expected letters, digits, '_', '.' and '-', as in other names")
        self.chat = policy.chat
        self.sampling = policy.sampling
        self._policy, self._name = policy, name

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        """See `environments.base.Model`. The turn carries the player's name."""
        return await self._policy.generate_as(self._name, prompt_ids, sampling)

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        """See `environments.base.Model`."""
        return await self._policy.parse(turn, tools, reasoning=reasoning)

    def reward(self, value: float, turn: int | Turn | None = None) -> None:
        """See `environments.base.Model`. Without `turn` it is for the last turn of this player."""
        self._policy.reward_as(self._name, value, turn)

    def player(self, name: str) -> Model:
        """Returns another player of the same rollout."""
        return self._policy.player(name)

    def opponent(self, name: str) -> Model:
        """See `environments.base.Model`."""
        return self._policy.opponent(name)


class OpponentModel(PlayerModel):
    """Another policy, which the run does not train: its turns become `Rollout.opponent_turns`."""

    def __init__(self, policy: RolloutPolicy, name: str, pool: GeneratingPool) -> None:
        super().__init__(policy, name)
        self._pool = pool

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        """Calls the opponent with the environment's sampling parameters, and returns its turn, which no sample will have."""
        prompt = as_prompt(prompt_ids)
        turn = await self._policy.call(self._pool, prompt, sampling, routed_experts_start=len(prompt))
        self._policy.note(self._name, turn)
        return turn

    def reward(self, value: float, turn: int | Turn | None = None) -> None:
        """Raises `ValueError`: nothing of an opponent is trained."""
        raise ValueError(NO_TURN_OF_OURS.format(self._name))


def as_prompt(prompt_ids: Sequence[int]) -> Int32Array:
    """Returns a prompt as an array. Raises `ValueError` unless it is a flat, non-empty sequence."""
    prompt = np.asarray(prompt_ids, dtype=np.int32)
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(f"a prompt must be a flat, non-empty sequence of token ids; this one has shape {prompt.shape}")
    return prompt
