"""What counts as a reward: a number, one for each player, or one for each turn with their sum."""

from __future__ import annotations

import inspect
import math
import operator
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from counterpoint.transport.config import IDENTIFIER_PATTERN
from counterpoint.transport.records import Float32Array, Rollout, Turn

MOST_PLAYERS = 64
"""The players of one rollout. Their names are in every record of it."""


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of a rollout in parts, which `score` may return in place of a number.

    `Reward()` alone counts what `Model.reward` gave.
    """

    total: float | Mapping[str, float] | None = None
    """The rollout's reward, or that of each player by name. None: the sum of the turns'; where players have turns, of each
    player's own turns. Another number than this sum, up to the rounding of float32, fails the rollout."""
    turns: Sequence[float] | npt.NDArray[Any] | None = None
    """The reward of each turn, one for each of `rollout.turns`, in their order. None: those that `Model.reward` gave
    (`rollout.turn_rewards`). A turn to which that gave a reward other than 0 must have the same here."""


class Rewards(NamedTuple):
    """The rewards of one rollout, checked."""

    reward: float
    """The reward of the rollout."""
    by_player: dict[str, float]
    """The reward of each player, where players have rewards of their own."""
    turns: Float32Array | None = None
    """The reward of each turn, `[turns]`, read-only, where turns have rewards."""


RewardBounds = tuple[float, float]
"""The least and the greatest reward that an environment can give."""

_SCORING = frozenset({"score", "score_group", "reward"})
"""The methods of an environment that decide about its rewards."""

_ROUNDING = 1e-9
"""How far a sum of weighted parts may be outside its bounds, as a share of the larger one's size."""

_FLOAT32_ROUNDING = float(np.finfo(np.float32).eps)
"""How far a reward of a turn may be off, as a share of its size."""


LARGEST_OF_A_TURN = float(np.finfo(np.float32).max)
"""The largest reward of a turn in size: records have it as float32."""

NO_TURN_OF_OURS = "a reward for the opponent {!r}: its turns are not the rollout's; give it to a turn of the policy"


class NoReward(TypeError):
    """What scores returned no reward, or parts that do not fit. The text names what scores, with its file and line."""


_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def number_in(text: str) -> float | None:
    """Returns the number that a text is, without white space around it; None if it is none, or not finite.

    A program or a model wrote the text. Digits are those of ASCII, without separators, unlike in Python's `float`.
    """
    text = text.strip()
    number = float(text) if _NUMBER.fullmatch(text) else math.inf
    return number if math.isfinite(number) else None


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
        if not isinstance(value, Real | np.bool_) or not abs(value) <= LARGEST_OF_A_TURN:
            raise ValueError(
                f"the reward of turn {index} is {reprlib.repr(value)} ({type(value).__name__}); expected a finite number of "
                f"at most {LARGEST_OF_A_TURN:.2g} in size"
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


def with_zeros(rewards: Float32Array, turns: int) -> Float32Array:
    """Returns the rewards of turns, `[turns]`, read-only, 0 for those that came when the others had been scored."""
    padded = np.pad(rewards, (0, turns - len(rewards)))
    padded.flags.writeable = False
    return padded


def as_bounds(value: object) -> RewardBounds:
    """Converts what an environment or its configuration has as `reward_bounds`. Raises `ValueError` for anything else."""
    match value:
        case [int() | float() as least, int() | float() as greatest]:
            with suppress(OverflowError):  # an integer of over 308 digits
                if float(least) < float(greatest) and math.isfinite(float(greatest) - float(least)):
                    return float(least), float(greatest)
    raise ValueError(
        f"reward_bounds = {reprlib.repr(value)}; expected two finite numbers, the least reward and a greater one"
    )


def own_bounds(environment: object) -> RewardBounds | None:
    """Returns the `reward_bounds` of an environment, if it has any. A class that scores in its own way does not inherit them.

    Raises `ValueError` for what are no bounds.
    """
    value = getattr(environment, "reward_bounds", None)
    if value is None:
        return None
    if "reward_bounds" not in getattr(environment, "__dict__", ()):
        for each in type(environment).__mro__:
            if "reward_bounds" in vars(each):
                break
            if not _SCORING.isdisjoint(vars(each)):
                return None
    return as_bounds(value)


def check_bounds(rewards: Rewards, bounds: RewardBounds | None, environment: str) -> Rewards:
    """Returns `rewards`. Raises `ValueError`, which names the environment, if one of them is outside its `reward_bounds`.

    They hold for the reward of a rollout, a player and a turn alike. A reward that is not finite is not for here: whoever takes
    it says so.
    """
    if bounds is None:
        return rewards
    least, greatest = bounds
    turns = [] if rewards.turns is None else rewards.turns.tolist()
    slack = max(_ROUNDING, len(turns) * _FLOAT32_ROUNDING) * max(abs(least), abs(greatest))
    given = [("", each) for each in rewards.by_player.values() or (rewards.reward,)]
    for whose, each in [*given, *((f" of turn {index}", each) for index, each in enumerate(turns))]:
        if math.isfinite(each) and not least - slack <= each <= greatest + slack:
            raise ValueError(
                f"environment {environment!r}: the reward{whose} is {each!r}, and its reward_bounds are [{least:g}, "
                f"{greatest:g}]. Correct what scores, or declare the bounds that it keeps"
            )
    return rewards


def as_rewards(value: object, score: Callable[..., Any], rollout: Rollout) -> Rewards:
    """Converts what `score` returned for `rollout`: a number, one for each player by name, or a `Reward`.

    With rewards of players the rollout's is their mean. The name of turns that are of no player is empty. Raises `NoReward` for
    a reward that is no finite number, for rewards of turns that do not fit the turns, and for a total that is not their sum;
    `ValueError` for other names than a player may have, none of them or more than `MOST_PLAYERS`.
    """
    in_parts = isinstance(value, Reward)
    total, given = (value.total, value.turns) if isinstance(value, Reward) else (value, None)
    turns = rollout.turn_rewards if given is None else _as_turns(given, score, rollout)
    if total is None and in_parts:
        if turns is None:
            raise _unfit(score, f"returned {value!r}, and no turn got a reward: give turns rewards, or a total")
        by_player = _sums(turns.tolist(), rollout.turns)
        total = by_player if by_player.keys() - {""} else math.fsum(turns.tolist())
        return Rewards(*_totals(total, score), turns)
    rewards = Rewards(*_totals(total, score), turns)
    if turns is not None:
        _check_total(rewards, turns.tolist(), rollout.turns, score)
    return rewards


def _totals(value: object, score: Callable[..., Any]) -> tuple[float, dict[str, float]]:
    """Returns the reward of the rollout, and of each player where there is one for each."""
    if not isinstance(value, Mapping):
        return _as_reward(value, score), {}
    if len(value) > MOST_PLAYERS:
        raise ValueError(f"there are rewards for {len(value)} players; expected at most {MOST_PLAYERS}")
    for player in value:
        if player != "" and re.fullmatch(IDENTIFIER_PATTERN, str(player)) is None:
            raise ValueError(
                f"there is a reward for the player {reprlib.repr(player)}; expected a name of up to 64 letters, digits, '_', "
                "'.' and '-', which begins with a letter or digit"
            )
    rewards = {str(player): _as_reward(reward, score, f" for player {player!r}") for player, reward in value.items()}
    if not rewards:
        raise ValueError("the rewards by player are empty; expected one for each player, or a number")
    return sum(rewards.values()) / len(rewards), rewards


def _as_turns(values: object, score: Callable[..., Any], rollout: Rollout) -> Float32Array:
    """Converts the rewards of turns that `score` returned, and compares them with those that the turns had before."""
    if not isinstance(values, Sequence | np.ndarray) or len(values) != len(rollout.turns):
        found = f"{len(values)} rewards" if isinstance(values, Sequence | np.ndarray) else reprlib.repr(values)
        expected = "expected a list with one for each of rollout.turns, in their order"
        raise _unfit(score, f"returned {found} for {len(rollout.turns)} turns; {expected}")
    numbers = [_as_reward(each, score, f" for turn {index}") for index, each in enumerate(values)]
    with np.errstate(over="ignore"):
        turns = np.array(numbers, np.float32)
    before = turns if rollout.turn_rewards is None else rollout.turn_rewards
    for index in np.flatnonzero(~np.isfinite(turns) | ((turns != before) & (before != 0)))[:1].tolist():
        told = f"expected at most {LARGEST_OF_A_TURN:.2g} in size"
        if math.isfinite(turns[index]):
            told = f"`reward` of the model gave it {before[index]:g} before, and a turn gets one reward"
        raise _unfit(score, f"returned {numbers[index]!r} for turn {index}; {told}")
    turns.flags.writeable = False
    return turns


def _sums(rewards: Sequence[float], turns: Sequence[Turn]) -> dict[str, float]:
    """Returns the sum of the rewards of each player's turns, by name; of turns that are of no player, as ''."""
    own: dict[str, list[float]] = {}
    for reward, turn in zip(rewards, turns, strict=True):
        own.setdefault(turn.player, []).append(reward)
    return {player: math.fsum(own[player]) for player in sorted(own)}


def _check_total(rewards: Rewards, by_turn: Sequence[float], turns: Sequence[Turn], score: Callable[..., Any]) -> None:
    """Raises `NoReward` if a total is not the sum of the rewards of the turns, up to the rounding of float32."""
    slack = len(by_turn) * _FLOAT32_ROUNDING * math.fsum(map(abs, by_turn))
    by_player = _sums(by_turn, turns)
    told = [(f" for player {name!r}", each, by_player.get(name, each)) for name, each in rewards.by_player.items()]
    for whose, total, expected in told or [("", rewards.reward, math.fsum(by_turn))]:
        if abs(total - expected) > slack:
            raise _unfit(
                score,
                f"returned {total!r}{whose}, and the rewards of the turns add up to {expected!r}: give a turn the difference, "
                "or return Reward() for the sum",
            )


def _unfit(score: Callable[..., Any], what: str) -> NoReward:
    return NoReward(f"{getattr(score, '__name__', 'score')} {what} (in {place_of(score)})")


def as_group_rewards(values: object, rollouts: Sequence[Rollout], score: Callable[..., Any]) -> list[Rewards]:
    """Does as `as_rewards` with what `score_group` returned for `rollouts`. Raises `ValueError` for another number of rewards."""
    if inspect.isawaitable(values) or not isinstance(values, Iterable):
        raise NoReward(_no_reward(values, score, "a list of numbers"))
    given = list(values)
    if len(given) != len(rollouts):
        raise ValueError(f"score_group returned {len(given)} rewards for {len(rollouts)} rollouts")
    return [as_rewards(value, score, rollout) for value, rollout in zip(given, rollouts, strict=True)]


def _as_reward(value: object, score: Callable[..., Any], whose: str = "") -> float:
    """Converts a finite number of Python or numpy; a truth value counts as 1 or 0. Raises `NoReward` for anything else.

    A number as text is refused, too: a parser's output that reaches the score is an error in the environment.
    """
    if not isinstance(value, Real | np.bool_):
        raise NoReward(_no_reward(value, score, "a number", whose))
    with suppress(OverflowError):  # an integer of over 308 digits
        if math.isfinite(reward := float(value)):
            return reward
    raise NoReward(_no_reward(value, score, "a finite number", whose))


def _no_reward(value: object, score: Callable[..., Any], expected: str, whose: str = "") -> str:
    name = getattr(score, "__name__", "score")
    if inspect.iscoroutine(value):
        value.close()
        said = f"{name} returned a coroutine{whose}; expected {expected}: `await` is missing before the call of {place_of(value)}"
    else:
        said = f"{name} returned {reprlib.repr(value)} ({type(value).__name__}){whose}; expected {expected}"
        said += ": one of its branches may lack a `return`" if value is None else ""
    return f"{said} (in {place_of(score)})"


def place_of(function: object) -> str:
    """Returns a function's or a coroutine's name with its file and line, as text for a person."""
    inner: Any = inspect.unwrap(function) if callable(function) else function
    code = getattr(inner, "__code__", None) or getattr(inner, "cr_code", None)
    name = str(getattr(inner, "__name__", inner))
    return name if code is None else f"{name}, {code.co_filename}:{code.co_firstlineno}"
