"""Advantages from the rewards of a group or of a step: built-in functions, and any other by import path.

An advantage function gets the completed rollouts of a group and returns, for each, one number or one for each of its turns.
`load_advantage` turns the configuration into an `Advantage`, which applies the length penalty, calls the function and refuses a
result that cannot be trained on. `finalize.py` calls it in a worker thread. An advantage relative to a whole step needs all
groups of the step, so `batch_form.py` calls `Advantage.over_step` at the step boundary.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from counterpoint.environments.describe_error import describe_error
from counterpoint.environments.import_path import check_allowed, import_advice, import_module
from counterpoint.orchestrator.credit import turn_advantages
from counterpoint.orchestrator.credit.equal_rewards import ROUNDING, above_others, centred, differ
from counterpoint.run.config import AdvantageConfig, OverlongConfig
from counterpoint.run.loss import LossConfig
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.records import Rollout, Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Argument of an advantage function: copies of a group's completed rollouts, each with a finite reward.

    The length penalty is already subtracted.
    """

    rollouts: list[Rollout]
    discount: float = 1.0
    """The configured `advantage.discount`, from one turn to the next."""

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """Rewards, `[rollouts]`, float64, in order."""
        return np.array([rollout.reward for rollout in self.rollouts], dtype=np.float64)

    @property
    def turn_rewards(self) -> list[npt.NDArray[np.float64]]:
        """Returns the rewards of each rollout's turns, `[turns]`. Its whole reward is the last turn's if none has its own."""
        return [_rewards_of_turns(rollout) for rollout in self.rollouts]


OfRollout = float | npt.NDArray[np.float64]
"""The advantage of a rollout, or those of its turns, `[turns]`."""


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """Result of an advantage function: for each rollout, in order, a finite number, or an array or list of one for each turn."""

    advantages: Sequence[float | Sequence[float] | npt.NDArray[Any]]


LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
"""Advantages are sent as float32: a larger one would become infinite, and the trainer refuses such a batch for good."""

STATES = "turn_states"
"""The name in a rollout's `state` for the list of the states in which its turns began, for `anchor_states`."""

_OF_STATES = orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
"""How a state becomes JSON: all that the state of a rollout may hold does (`transport/json_values.py`)."""

AdvantageFunction = Callable[[AdvantageInputs], AdvantageOutputs]


class AdvantageError(ValueError):
    """A failed advantage function, or a result that cannot be trained on. The message names the function."""


def group_mean(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward minus the group's mean, not divided by anything (Dr. GRPO, Liu et al., arXiv:2503.20783)."""
    return AdvantageOutputs(centred(inputs.rewards).tolist())


def standardised(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward minus the group's mean, over the group's (population) standard deviation (GRPO, Shao et al., arXiv:2402.03300).

    Zero if all rewards are equal, up to `ROUNDING`.
    """
    return AdvantageOutputs(_standardised(inputs.rewards).tolist())


def leave_one_out(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward minus the mean of the *other* rewards (RLOO, Ahmadian et al., arXiv:2402.14740). Zero for a single rollout."""
    return AdvantageOutputs(above_others(inputs.rewards).tolist())


def _rewards(inputs: AdvantageInputs) -> AdvantageOutputs:
    return AdvantageOutputs(inputs.rewards.tolist())


def _over_deviation(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns values over their (population) standard deviation, or zeros if all are equal."""
    return values / values.std() if differ(values) else np.zeros_like(values)


def _standardised(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns values minus their mean, over their (population) standard deviation, or zeros if all are equal."""
    return _over_deviation(centred(values))


def turn_returns(inputs: AdvantageInputs) -> AdvantageOutputs:
    """The return from each turn on, minus the mean of the others' from the same turn number on: `turn_advantages.turn_returns`.

    It is REINFORCE with reward to go (Williams, 1992; Sutton et al., "Policy Gradient Methods", 1999) and RLOO's baseline by turn
    number. Unbiased with a discount of 1. A lower discount pays early turns less for what comes late, as usual without the factor
    `discount ** t` of a gradient of the discounted return: then it is the gradient of no objective (Nota and Thomas,
    arXiv:1906.07073), with less variance.
    """
    return AdvantageOutputs(turn_advantages.turn_returns(inputs.turn_rewards, inputs.discount))


def anchor_states(inputs: AdvantageInputs) -> AdvantageOutputs:
    """The same, minus the mean of the others' returns from turns in the same state: `turn_advantages.anchor_states`.

    The groups of turns are those of GiGPO (Feng et al., arXiv:2505.10978). That adds the advantage of the whole rollout, and its
    means and deviations have the turn's own return in them, which makes them biased. This has the siblings' returns alone, and is
    unbiased as `turn_returns` if a state says nothing of what is sampled from it on.
    """
    states = [_states_of_turns(rollout) for rollout in inputs.rollouts]
    return AdvantageOutputs(turn_advantages.anchor_states(inputs.turn_rewards, states, inputs.discount))


def _rewards_of_turns(rollout: Rollout) -> npt.NDArray[np.float64]:
    if rollout.turn_rewards is not None:
        return rollout.turn_rewards.astype(np.float64)
    rewards = np.zeros(len(rollout.turns))
    rewards[-1] = rollout.reward
    return rewards


def _states_of_turns(rollout: Rollout) -> list[Hashable]:
    """Returns a key for the state in which each turn began: what the environment noted, else the tokens of its prompt.

    Raises `AdvantageError` for a note that is no list with a value of JSON for each turn (`Advantage.fault_of`).
    """
    if rollout.state.get(STATES) is None:
        return [hashlib.blake2b(turn.prompt_ids.tobytes(), digest_size=16).digest() for turn in rollout.turns]
    try:
        return _noted_states(rollout)
    except ValueError as error:
        raise AdvantageError(f"rollout {rollout.rollout_id}: {error}") from None


def _noted_states(rollout: Rollout) -> list[Hashable]:
    """Returns a key for each state that the environment noted, none if it noted none. Raises `ValueError`."""
    states = rollout.state.get(STATES)
    if states is None:
        return []
    if not isinstance(states, list) or len(states) != len(rollout.turns):
        found = f"{len(states)} values" if isinstance(states, list) else type(states).__name__
        raise ValueError(
            f"state[{STATES!r}] has {found} for {len(rollout.turns)} turns; expected a list with the state in which each turn "
            "began, as JSON, also of a turn whose call was cancelled"
        )
    keys: list[Hashable] = []
    for turn, state in enumerate(states):
        try:
            keys.append(dumps(state, option=_OF_STATES))
        except TypeError as error:
            raise ValueError(f"state[{STATES!r}][{turn}] is no JSON: {error}") from None
    return keys


BUILT_IN: dict[str, AdvantageFunction] = {
    "group_mean": group_mean,
    "standardised": standardised,
    "leave_one_out": leave_one_out,
    "batch_standardised": _rewards,
    "group_mean_batch_scaled": group_mean,
    "turn_returns": turn_returns,
    "anchor_states": anchor_states,
}
"""The built-in functions, by name: advantages from the rollouts of a group."""

OVER_STEP: dict[str, Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]] = {
    "batch_standardised": _standardised,
    "group_mean_batch_scaled": _over_deviation,
}
"""Functions over a step, by name: from the group function's results for a step's rollouts to their advantages (REINFORCE++ and
its variant with the group's mean as baseline, Hu et al., arXiv:2501.03262, there over tokens, here over rollouts)."""


@dataclass(frozen=True, slots=True)
class Advantage:
    """A run's advantage function with its length penalty."""

    name: str
    """The configured name, for errors."""
    function: AdvantageFunction
    length_penalty: float = 0.0
    overlong: OverlongConfig | None = None
    discount: float = 1.0
    one_number: bool = False
    """Whether numbers for single turns are refused, since the loss weighs a sample's tokens by the sum of theirs."""

    @property
    def is_built_in(self) -> bool:
        """Whether it is built in, and so known to terminate."""
        return self.name in BUILT_IN

    def fault_of(self, rollout: Rollout) -> str | None:
        """Returns why the function cannot compare a rollout with any other, for a person, or None."""
        if self.function is anchor_states:
            try:
                _noted_states(rollout)
            except ValueError as error:
                return f"StateError: {error}"
        return None

    def compute(self, rollouts: Sequence[Rollout]) -> list[OfRollout]:
        """Returns the advantage, or those of the turns, of each of a group's completed rollouts, in order, and changes none.

        Raises `AdvantageError` if the function raises, or returns a wrong type or number, or a value that is not finite.
        """
        try:
            outputs = self.function(AdvantageInputs(self._penalised(rollouts), self.discount))
            return self._checked(outputs, rollouts)
        except AdvantageError:
            raise
        except BaseException as error:  # an operator's function may raise anything; one group fails
            raise AdvantageError(f"advantage function {self.name!r} raised {describe_error(error)}") from error

    def over_step(self, rollouts: Sequence[Rollout]) -> None:
        """Makes advantages relative to all trained rollouts of a step, if the function is one over a step.

        Players with separate rewards are each relative to themselves. After a change of the function, rollouts that another one
        has finalized are relative to one another, by that. Call it once for a step.
        """
        trained = [rollout for rollout in rollouts if rollout.error is None and rollout.filtered_by is None]
        for kind, function in OVER_STEP.items():
            self._relative(function, [each for each in trained if (each.advantage_kind or self.name) == kind])

    def _relative(
        self, function: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]], trained: Sequence[Rollout]
    ) -> None:
        alone = [rollout for rollout in trained if not rollout.player_advantages]
        if alone:
            for rollout, value in zip(alone, function(_array(each.advantage for each in alone)).tolist(), strict=True):
                rollout.advantage = value
        played = [rollout for rollout in trained if rollout.player_advantages]
        for player in sorted({player for rollout in played for player in rollout.player_advantages}):
            own = [rollout for rollout in played if player in rollout.player_advantages]
            values = function(_array(rollout.player_advantages[player] for rollout in own)).tolist()
            for rollout, value in zip(own, values, strict=True):
                rollout.player_advantages = rollout.player_advantages | {player: value}
        for rollout in played:
            rollout.advantage = max(rollout.player_advantages.values(), key=abs)

    def _penalised(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Returns copies with penalised rewards, so that records keep the original ones.

        An operator's function gets copies of the turns, too, and cannot change the batch. Where turns have rewards, the last
        one's is penalised: a penalty depends on all turns, so it is part of the return from each of them on.
        """
        is_plain = self.is_built_in and self.overlong is None and not self.length_penalty
        if is_plain and all(rollout.turn_rewards is None for rollout in rollouts):
            return list(rollouts)  # what is built in changes none of them
        rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
        lengths = np.array([sum(len(turn.completion_ids) for turn in rollout.turns) for rollout in rollouts])
        if self.overlong is not None:
            longest = np.array(
                [max((len(turn.completion_ids) for turn in rollout.turns), default=0) for rollout in rollouts]
            )
            rewards = rewards - overlong_penalties(self.overlong, longest)
        counted = rewards - length_penalties(self.length_penalty, rewards, lengths)
        shown = [rollout.with_turns(self._shown(rollout.turns)) for rollout in rollouts]
        for rollout, given, reward in zip(shown, rollouts, counted.tolist(), strict=True):
            rollout.reward = reward
            if rollout.turn_rewards is not None and given.reward is not None:
                rollout.turn_rewards = rollout.turn_rewards.copy()
                rollout.turn_rewards[-1] += reward - given.reward
        return shown

    def _shown(self, turns: list[Turn]) -> list[Turn]:
        return turns if self.is_built_in else [turn.detached() for turn in turns]

    def _checked(self, outputs: object, rollouts: Sequence[Rollout]) -> list[OfRollout]:
        if not isinstance(outputs, AdvantageOutputs):
            raise AdvantageError(
                f"advantage function {self.name!r} returned {type(outputs).__name__}; expected AdvantageOutputs"
            )
        advantages: object = outputs.advantages
        if not isinstance(advantages, list | tuple | np.ndarray):
            raise AdvantageError(
                f"advantage function {self.name!r} returned advantages of type {type(advantages).__name__}; "
                "expected a list with a number, or an array of one for each turn, for each rollout"
            )
        if len(advantages) != len(rollouts):
            raise AdvantageError(
                f"advantage function {self.name!r} returned {len(advantages)} advantages for {len(rollouts)} rollouts; "
                "expected one each"
            )
        return [self._checked_one(value, rollout) for value, rollout in zip(advantages, rollouts, strict=True)]

    def _checked_one(self, value: object, rollout: Rollout) -> OfRollout:
        by_turn = isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1)
        numbers: Sequence[object] = list(value) if by_turn else [value]  # type: ignore[call-overload]
        if by_turn and len(numbers) != len(rollout.turns):
            raise AdvantageError(
                f"advantage function {self.name!r} returned {len(numbers)} numbers for rollout {rollout.rollout_id}, which has "
                f"{len(rollout.turns)} turns; expected one each, or one for the rollout"
            )
        if by_turn and self.one_number:
            raise AdvantageError(
                f"advantage function {self.name!r} returned a number for each turn of rollout {rollout.rollout_id}, and the loss "
                'weighs each token of a sample by all of them; set training.loss.ratio_level = "token", or return one number'
            )
        for turn, number in enumerate(numbers):
            if not _fits_float32(number):
                place = f" at turn {turn}" if by_turn else ""
                raise AdvantageError(
                    f"advantage function {self.name!r} returned {number!r} for rollout {rollout.rollout_id}{place}; "
                    f"expected a finite number of at most {LARGEST_FLOAT32:.2g} in size"
                )
        found = np.array(numbers, dtype=np.float64)
        return found if by_turn else float(found[0])


def length_penalties(
    coefficient: float, rewards: npt.NDArray[np.float64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Returns the numbers to subtract from each reward of a group, `[rollouts]`.

    Each is the coefficient, times the pass rate, times the rollout's completion tokens over those of the longest successful
    one. Only successful rollouts are penalised: those with the group's best reward, if it is above zero. The pass rate is the
    mean reward, within 0 and 1. So a group that never succeeds is not trained to fail in fewer tokens, and one that always
    succeeds has the largest penalty. For example, with a coefficient of 0.2 and a pass rate of 0.5, the longest successful
    rollout loses at most 0.1. These two gates are those of prime-rl's linear length penalty (`coef` and `gate_by_correctness`,
    https://github.com/PrimeIntellect-ai/prime-rl/pull/2702), which divides by the sequence length instead. The limit is ours: a
    penalty is at most half of the lead over the others' best reward, so that a better reward never ranks below a worse one.
    """
    best = rewards.max()
    successful = rewards >= best - ROUNDING * abs(best)
    if coefficient == 0 or best <= 0:
        return np.zeros_like(rewards)
    largest = coefficient * float(np.clip(rewards.mean(), 0, 1))
    if not successful.all():
        largest = min(largest, (best - rewards[~successful].max()) / 2)
    return np.where(successful, largest * lengths / max(1, lengths[successful].max()), 0.0)


def overlong_penalties(config: OverlongConfig, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns the numbers to subtract from rewards for the lengths of completions, `[rollouts]`.

    Nothing up to `longest - buffer` tokens, `penalty` from `longest` on, and linear in between: the soft overlong punishment of
    DAPO (Yu et al., arXiv:2503.14476, equation 13).
    """
    if config.longest is None or config.buffer is None:
        raise ValueError("advantage.overlong takes longest and buffer")
    return config.penalty * np.clip((lengths - (config.longest - config.buffer)) / config.buffer, 0.0, 1.0)


def _array(values: Iterable[float]) -> npt.NDArray[np.float64]:
    return np.fromiter(values, dtype=np.float64)


def _fits_float32(value: object) -> bool:
    if not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        return abs(float(value)) <= LARGEST_FLOAT32  # False for NaN, too
    except OverflowError:
        return False


def load_advantage(config: AdvantageConfig, loss: LossConfig | None = None) -> Advantage:
    """Loads the configured function, a built-in by name or `module:function`, for a run with this loss, if it is known.

    Raises `ValueError` if name, module or function do not exist, with the value and the expectation.
    """
    function = BUILT_IN.get(config.kind) or _imported(config.kind)
    one_number = loss is not None and loss.mixes_tokens
    return Advantage(config.kind, function, config.length_penalty, config.overlong, config.discount, one_number)


def try_advantage(advantage: Advantage, group_size: int) -> None:
    """Calls an operator's function once, with a made-up group of `group_size` rollouts that differ in reward and length.

    Raises `ValueError` for a result that `Advantage` refuses, and for a use of the rollouts that fails with any. Only logs any
    other exception of the function, since a made-up rollout has no state.
    """
    if advantage.is_built_in:
        return
    group = [_made_up(index, group_size) for index in range(group_size)]
    try:
        advantage.compute(group)
    except AdvantageError as error:
        if error.__cause__ is None:
            raise ValueError(f"advantage.kind = {advantage.name!r}, called with a made-up group: {error}") from error
        if _is_misuse(error.__cause__):
            raise ValueError(
                f"advantage.kind = {advantage.name!r}, called with a made-up group: {error}; a rollout is an object with "
                "reward, turns, state and metrics, such as rollout.reward"
            ) from error
        logger.warning("called with a made-up group, whose rollouts have no state, the %s", error)


def _is_misuse(error: BaseException) -> bool:
    """Whether an operator's function took a rollout or a turn for a dictionary, or for an object with other fields."""
    if isinstance(error, AttributeError):
        return isinstance(error.obj, Rollout | Turn | AdvantageInputs)
    return isinstance(error, TypeError) and str(error).startswith(("'Rollout' object", "'Turn' object"))


def _made_up(index: int, group_size: int) -> Rollout:
    length = index + 1
    turn = Turn(
        prompt_ids=np.zeros(1, dtype=np.int32),
        completion_ids=np.zeros(length, dtype=np.int32),
        log_probabilities=np.full(length, -1.0, dtype=np.float32),
        policy_version=0,
        finish_reason="stop",
    )
    turns, reward = [turn] * (1 + index % 2), index / group_size
    given = np.array([0.0] * (len(turns) - 1) + [reward], dtype=np.float32)
    return Rollout(f"0-{index}", 0, "made-up", 0, turns=turns, reward=reward, turn_rewards=given)


def _imported(path: str) -> AdvantageFunction:
    module_name, colon, function_name = path.partition(":")
    if not (colon and module_name and function_name):
        nearest = difflib.get_close_matches(path, BUILT_IN, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"advantage.kind = {path!r}: expected one of {', '.join(BUILT_IN)} (nearest: {nearest}) "
            "or an import path such as 'package.module:function'"
        )
    check_allowed(path, "advantage.kind")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # an operator's module may fail in any way while it is imported
        raise ValueError(
            f"advantage.kind = {path!r}: cannot import {module_name!r} ({type(error).__name__}: {error})"
            f"{import_advice(module_name, error)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "has no such name" if function is None else f"has a {type(function).__name__} there, not a function"
        raise ValueError(f"advantage.kind = {path!r}: the module {module_name!r} {found}")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise ValueError(f"advantage.kind = {path!r}: {error}; expected a function of AdvantageInputs alone") from error
    loaded: AdvantageFunction = function
    return loaded
