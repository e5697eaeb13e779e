"""Rewards of one group become advantages: three built-in functions, and any other by import path.

An advantage function sees the completed rollouts of a group and answers one number for each. `load_advantage` turns the
configuration into an `Advantage`, which applies the length penalty, calls the function and refuses an answer that could not be
trained on. `judge.py` calls it in a worker thread.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from environments.import_path import import_advice
from orchestrator.config import AdvantageConfig
from orchestrator.describe_error import describe_error
from transport.records import Rollout


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What an advantage function may look at: the completed rollouts of one group, each with a finite reward (the length
    penalty, if any, already subtracted). They are shared with the rest of the program: read them, do not change them."""

    rollouts: list[Rollout]

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        """`[rollouts]`, in order."""
        return np.array([rollout.reward for rollout in self.rollouts], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """What it answers: one finite number for each rollout, in order."""

    advantages: list[float]


LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
"""Advantages travel as float32: a larger one would become infinite in the batch, which the trainer refuses for good."""

AdvantageFunction = Callable[[AdvantageInputs], AdvantageOutputs]


class AdvantageError(ValueError):
    """An advantage function failed or answered what cannot be trained on; the message names it."""


def group_mean(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward minus the group's mean, not divided by anything (Dr. GRPO, Liu et al., arXiv:2503.20783)."""
    return AdvantageOutputs(_centred(inputs.rewards).tolist())


def standardised(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward minus the group's mean, over the group's (population) standard deviation (GRPO, Shao et al.,
    arXiv:2402.03300). Zero where all rewards are equal."""
    centred = _centred(inputs.rewards)
    deviation = float(centred.std())
    return AdvantageOutputs((centred / deviation if deviation > 0 else centred).tolist())


def leave_one_out(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Reward minus the mean of the *other* rewards (RLOO, Ahmadian et al., arXiv:2402.14740). Zero for a rollout alone."""
    count = len(inputs.rollouts)
    scale = count / (count - 1) if count > 1 else 0.0
    return AdvantageOutputs((_centred(inputs.rewards) * scale).tolist())


def _centred(rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Rewards minus their mean. The first reward is subtracted before, so that equal rewards give exactly zero: a residue of
    rounding would pass the zero-advantage filter, and dividing by its own deviation would make it 1."""
    shifted = rewards - rewards[0]
    centred: npt.NDArray[np.float64] = shifted - shifted.mean()
    return centred


BUILT_IN: dict[str, AdvantageFunction] = {
    "group_mean": group_mean,
    "standardised": standardised,
    "leave_one_out": leave_one_out,
}


@dataclass(frozen=True, slots=True)
class Advantage:
    """A run's advantage function with its length penalty."""

    name: str
    """As configured; errors carry it."""
    function: AdvantageFunction
    length_penalty: float = 0.0

    @property
    def is_built_in(self) -> bool:
        """Whether it is one of ours, which computes and comes to an end."""
        return self.name in BUILT_IN

    def compute(self, rollouts: Sequence[Rollout]) -> list[float]:
        """One advantage for each of a group's completed rollouts, in order; the rollouts stay as they are.

        Raises `AdvantageError` when the function raises, or answers the wrong type or count, or a value that is not finite.
        """
        try:
            outputs = self.function(AdvantageInputs(self._penalised(rollouts)))
            return self._checked(outputs, rollouts)
        except AdvantageError:
            raise
        except BaseException as error:  # an operator's function may raise anything; it costs one group
            raise AdvantageError(f"advantage function {self.name!r} raised {describe_error(error)}") from error

    def _penalised(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Copies, so that what a function changes changes no batch, with the rewards that count: records keep the true ones."""
        lengths = [sum(len(turn.completion_ids) for turn in rollout.turns) for rollout in rollouts]
        longest = max(1, *lengths)
        return [
            replace(
                rollout,
                turns=list(rollout.turns),
                reward=(rollout.reward or 0.0) - self.length_penalty * length / longest,
            )
            for rollout, length in zip(rollouts, lengths, strict=True)
        ]

    def _checked(self, outputs: object, rollouts: Sequence[Rollout]) -> list[float]:
        if not isinstance(outputs, AdvantageOutputs):
            raise AdvantageError(
                f"advantage function {self.name!r} returned {type(outputs).__name__}; expected AdvantageOutputs"
            )
        advantages: object = outputs.advantages
        if not isinstance(advantages, list | tuple | np.ndarray):
            raise AdvantageError(
                f"advantage function {self.name!r} returned advantages of type {type(advantages).__name__}; "
                "expected a list of numbers"
            )
        if len(advantages) != len(rollouts):
            raise AdvantageError(
                f"advantage function {self.name!r} returned {len(advantages)} advantages for {len(rollouts)} rollouts; "
                "expected one each"
            )
        checked = []
        for rollout, value in zip(rollouts, advantages, strict=True):
            if not _fits_float32(value):
                raise AdvantageError(
                    f"advantage function {self.name!r} returned {value!r} for rollout {rollout.rollout_id}; "
                    f"expected a finite number of at most {LARGEST_FLOAT32:.2g} in size"
                )
            checked.append(float(value))
        return checked


def _fits_float32(value: object) -> bool:
    if not isinstance(value, int | float | np.integer | np.floating):
        return False
    try:
        return abs(float(value)) <= LARGEST_FLOAT32  # which NaN is not, either
    except OverflowError:
        return False


def load_advantage(config: AdvantageConfig) -> Advantage:
    """The configured function: a built-in by name, or `module:function`.

    Raises `ValueError` naming the value and what was expected when there is no such name, module or function.
    """
    return Advantage(config.kind, BUILT_IN.get(config.kind) or _imported(config.kind), config.length_penalty)


def _imported(path: str) -> AdvantageFunction:
    module_name, colon, function_name = path.partition(":")
    if not (colon and module_name and function_name):
        nearest = difflib.get_close_matches(path, BUILT_IN, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"advantage.kind = {path!r}: expected one of {', '.join(BUILT_IN)} (nearest: {nearest}) "
            "or an import path such as 'package.module:function'"
        )
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # an operator's module may fail in any way while it is imported
        raise ValueError(
            f"advantage.kind = {path!r}: cannot import {module_name!r} ({type(error).__name__}: {error})"
            f"{import_advice(module_name, error)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "has no such name" if function is None else f"has a {type(function).__name__} there, not a function"
        raise ValueError(f"advantage.kind = {path!r}: the module {module_name!r} {found}")
    loaded: AdvantageFunction = function
    return loaded
