"""The rewards that the loop of an environment gives to turns while it plays them: `Model.reward` of every model of a rollout."""

from __future__ import annotations

import operator
import reprlib
from contextlib import suppress
from numbers import Real

import numpy as np

from counterpoint.transport.records import Float32Array, Turn

LARGEST = float(np.finfo(np.float32).max)
"""The largest reward of a turn in size: records have it as float32."""

NO_TURN_OF_OURS = "a reward for the opponent {!r}: its turns are not the rollout's; give it to a turn of the policy"


class TurnRewards:
    """The rewards of a rollout's turns so far, at most one for each."""

    def __init__(self, turns: list[Turn]) -> None:
        """`turns` are those of the rollout, in order of time. The list grows while it is played."""
        self._turns = turns
        self._given: dict[int, float] = {}
        self._numbers: dict[int, int] = {}
        """The turns by identity, as far as one was looked for."""
        self._unread: set[int] = set()

    def skip(self, turn: Turn) -> None:
        """Notes a turn that came after the loop had cancelled its call: it is not the last one that the loop knows."""
        self._unread.add(id(turn))

    def give(self, value: float, turn: int | Turn | None, player: str = "") -> None:
        """Does as `Model.reward`, for a player, or for none with ''. Raises `ValueError`."""
        index = self._index(turn, player)
        if player and (other := self._turns[index].player) != player:
            raise ValueError(f"turn {index} is of {f'player {other!r}' if other else 'no player'}, not of {player!r}")
        if not isinstance(value, Real | np.bool_) or not abs(value) <= LARGEST:
            raise ValueError(
                f"the reward of turn {index} is {reprlib.repr(value)} ({type(value).__name__}); expected a finite number of "
                f"at most {LARGEST:.2g} in size"
            )
        if index in self._given:
            raise ValueError(
                f"turn {index} has the reward {self._given[index]:g} already, and was to get {float(value):g}; a turn gets one "
                "reward: add them up first"
            )
        self._given[index] = float(value)

    def array(self) -> Float32Array | None:
        """Returns the rewards, `[turns]`, read-only, 0 for a turn that got none; None if no turn got one."""
        if not self._given:
            return None
        rewards = np.zeros(len(self._turns), np.float32)
        rewards[list(self._given)] = list(self._given.values())
        rewards.flags.writeable = False
        return rewards

    def _index(self, turn: int | Turn | None, player: str) -> int:
        """Returns the number of a turn among the rollout's, from 0. Raises `ValueError` for one that is not there."""
        turns = range(len(self._turns))
        if turn is None:
            for index in reversed(turns):
                each = self._turns[index]
                if id(each) not in self._unread and (not player or each.player == player):
                    return index
            raise ValueError(
                f"a reward before the first turn{f' of player {player!r}' if player else ''}: whose is it?"
            )
        if isinstance(turn, Turn):
            for index in range(len(self._numbers), len(self._turns)):
                self._numbers[id(self._turns[index])] = index
            if (number := self._numbers.get(id(turn))) is not None:
                return number
            raise ValueError("a reward for a turn that is not this rollout's: an opponent's, or another rollout's")
        with suppress(TypeError):
            if not isinstance(turn, bool) and (index := operator.index(turn)) in turns:
                return index
        raise ValueError(
            f"a reward for turn {reprlib.repr(turn)}; the rollout has {len(turns)} turns so far, which are numbered from 0"
        )
