"""The expected update of a step, by the real code, over all that its rollouts may be.

Each possible group of rollouts is made as records and goes the way of a run's: `finalize_group` (check, advantage, filters),
`choose_trained` (advantages of a step), `merge_rollout` and `assemble_batch`, then the loss that `load_loss` gives, with its
`divisor` and `token_weights`, differentiated by the log-probabilities. The model alone is missing: a token's log-probability
under the trained weights and under those that played it are put in as float64 logarithms of exact fractions, since a record has
float32. What is exact: the probability of each group, the gradient of each log-probability, and all sums. What is recovered from
floating point, as `exact.py` says: each token's advantage, and the derivative of the loss by each token's log-probability.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache, partial
from itertools import chain, product
from math import log, prod
from typing import Literal, NamedTuple

import numpy as np
import torch

from counterpoint.orchestrator.rollouts.trajectories import assemble_batch, merge_rollout
from counterpoint.orchestrator.step.advantages import OVER_STEP, Advantage, load_advantage
from counterpoint.orchestrator.step.batch_form import choose_trained
from counterpoint.orchestrator.step.finalize import finalize_group
from counterpoint.run.config import AdvantageConfig, ZeroAdvantageFilter
from counterpoint.run.loss import LossConfig
from counterpoint.trainer.losses.contract import Loss, LossInputs
from counterpoint.trainer.losses.load import load_loss
from counterpoint.trainer.losses.objectives import divisor, token_weights
from counterpoint.transport.records import Rollout, Turn
from perf.bias.exact import recovered
from perf.bias.processes import LONGEST, PROCESSES, Gradient, Step, Trajectory, Weights, gradient_of
from perf.bias.waiting import ages_when_trained

Selection = Literal["all", "zero", "cut", "wait", "drop"]
"""Which rollouts are trained. `zero`: groups without an advantage are replaced by others. `cut`: the environment leaves rollouts
untrained that end at the length limit. `wait`, `drop`: what `schedule.stragglers` says of groups that last long. `all`: all."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a run is configured with."""

    advantage: str
    loss: LossConfig
    staleness: int = 0
    """The age of the policy that plays, in updates; with `wait` and `drop` the largest age of a turn that is trained."""
    selection: Selection = "all"
    group_size: int = 2
    groups: int = 0
    """Groups of a step; 0: one, or two where advantages are relative to a whole step."""


class Update(NamedTuple):
    """An expected update, as a gradient of the expected reward, and whether all of it is exact."""

    gradient: Gradient
    exact: bool


class _Token(NamedTuple):
    """A trained token, as a loss gets it: two probabilities and an advantage."""

    trained: Fraction
    played: Fraction
    advantage: Fraction


class _Group(NamedTuple):
    """A group that is trained: its probability, its rollouts, and what and how old each of their turns is."""

    probability: Fraction
    rollouts: Sequence[Rollout]
    trajectories: Sequence[Trajectory]
    ages: Sequence[int]


class _Batch(NamedTuple):
    """What a loss gets of a step: its samples, and which turns their tokens are; and whether all of it is exact."""

    samples: tuple[tuple[_Token, ...], ...]
    turns: tuple[tuple[Step, ...], ...]
    exact: bool


def expected_update(case: Case) -> Update:
    """Returns the expected update of a step, per rollout, with the sign of a gradient of the expected reward.

    Raises `ValueError` for an advantage or a loss that cannot be loaded, or fails.
    """
    loss, weights, exact = load_loss(case.loss), Weights(), True
    coefficients = cache(partial(_coefficients, loss, case.loss))
    batches = _batches(case.advantage, case.staleness, case.selection, case.group_size, case.groups)
    for batch, probability in batches.items():
        found, is_exact = coefficients(batch.samples)
        exact = exact and is_exact and batch.exact
        for step, coefficient in zip(chain(*batch.turns), found, strict=True):
            key = step.state, step.action
            weights[key] = weights.get(key, Fraction(0)) + probability * coefficient
    return Update(gradient_of(weights), exact)


@lru_cache(maxsize=1)
def _batches(kind: str, staleness: int, selection: Selection, group_size: int, in_step: int) -> dict[_Batch, Fraction]:
    """Returns the probability of each batch of a step. The newest result is kept, for the losses that are computed of it."""
    advantage = load_advantage(AdvantageConfig(kind=kind))
    groups = list(_trained_groups(advantage, staleness, selection, group_size))
    total = sum((group.probability for group in groups), start=Fraction(0))
    found: dict[_Batch, Fraction] = {}
    for chosen in product(groups, repeat=in_step or (2 if kind in OVER_STEP else 1)):
        batch = _batch([_renamed(group, index) for index, group in enumerate(chosen)], advantage)
        probability = prod((group.probability / total for group in chosen), start=Fraction(1))
        found[batch] = found.get(batch, Fraction(0)) + probability
    return found


def _batch(groups: Sequence[_Group], advantage: Advantage) -> _Batch:
    """Makes a batch of groups, and reads from it what a loss gets, in an order of its samples that does not depend on theirs."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    choose_trained(1, rollouts, advantage)
    played = {
        rollout.rollout_id: (trajectory, group.ages)
        for group in groups
        for rollout, trajectory in zip(group.rollouts, group.trajectories, strict=True)
    }
    merged = [sample for rollout in rollouts if rollout.filtered_by is None for sample in merge_rollout(rollout)]
    batch = assemble_batch("bias", 1, merged)
    samples, exact = [], True
    for index, info in enumerate(batch.samples):
        own = slice(int(batch.sample_offsets[index]), int(batch.sample_offsets[index + 1]))
        trajectory, ages = played[info.rollout_id]
        is_trained = batch.loss_mask_T[own] == 1
        numbers = batch.token_ids_T[own][is_trained].tolist()
        advantages = [recovered(value, 24) for value in batch.advantages_T[own][is_trained].tolist()]
        steps = tuple(trajectory.steps[number] for number in numbers)
        tokens = tuple(
            _Token(step.probability(0), step.probability(ages[number]), each.value)
            for step, number, each in zip(steps, numbers, advantages, strict=True)
        )
        samples.append((tokens, steps))
        exact = exact and all(each.exact for each in advantages)
    samples.sort()
    return _Batch(tuple(tokens for tokens, _ in samples), tuple(steps for _, steps in samples), exact)


def _renamed(group: _Group, index: int) -> _Group:
    """Returns a copy of the group at its place in a step."""
    rollouts = [rollout.with_turns(rollout.turns) for rollout in group.rollouts]
    for position, rollout in enumerate(rollouts):
        rollout.rollout_id, rollout.group_id = f"{index}-{position}", index
    return group._replace(rollouts=rollouts)


def _trained_groups(advantage: Advantage, staleness: int, selection: Selection, group_size: int) -> Iterator[_Group]:
    """Yields every group of one process that would be in a batch; those that are not are replaced by others.

    Raises `ValueError` if the advantage function fails.
    """
    filters = [ZeroAdvantageFilter()] if selection == "zero" else []
    for trajectories in PROCESSES:
        for group in product(trajectories, repeat=group_size):
            ages = _ages(staleness, selection, group)
            if ages is None:
                continue
            rollouts = [_rollout(index, each, ages, selection == "cut") for index, each in enumerate(group)]
            outcome = finalize_group(rollouts, advantage, filters)
            if outcome.event.dropped is not None:
                raise ValueError(outcome.event.detail)
            if outcome.event.kept:
                probability = prod((each.probability(ages) for each in group), start=Fraction(1, len(PROCESSES)))
                yield _Group(probability, outcome.rollouts, group, ages)


def _ages(staleness: int, selection: Selection, group: Sequence[Trajectory]) -> tuple[int, ...] | None:
    """Returns the age of each turn of a group in the step that trains it; None if no step does."""
    if selection not in ("wait", "drop"):
        return (staleness,) * LONGEST
    return ages_when_trained(max(len(trajectory.steps) for trajectory in group), selection, staleness)


def _rollout(index: int, trajectory: Trajectory, ages: Sequence[int], leave_cut: bool) -> Rollout:
    """Returns the record of a rollout: the prompt of a turn is all before it, and its completion is its number."""
    turns: list[Turn] = []
    for number, step in enumerate(trajectory.steps):
        cut = trajectory.cut and number == len(trajectory.steps) - 1
        turn = Turn(
            prompt_ids=np.array([LONGEST, *range(number)], np.int32),
            completion_ids=np.array([number], np.int32),
            log_probabilities=np.array([log(step.probability(ages[number]))], np.float32),
            policy_version=LONGEST - ages[number],
            finish_reason="length" if cut else "stop",
        )
        if leave_cut and trajectory.cut:
            turn.leave_untrained()
        turns.append(turn)
    rewards = np.array([step.reward for step in trajectory.steps], np.float32)
    return Rollout(f"0-{index}", 0, "process", 0, turns=turns, reward=float(trajectory.reward), turn_rewards=rewards)


def _coefficients(loss: Loss, config: LossConfig, samples: Sequence[Sequence[_Token]]) -> tuple[list[Fraction], bool]:
    """Returns what the loss multiplies the gradient of each token's log-probability by, and whether all of it is exact."""
    tokens = [token for sample in samples for token in sample]
    lengths = [len(sample) for sample in samples]
    trained_P, played_P, advantages_P = (
        torch.tensor(values, dtype=torch.float64)
        for values in (
            [log(token.trained) for token in tokens],
            [log(token.played) for token in tokens],
            [float(token.advantage) for token in tokens],
        )
    )
    inputs = LossInputs(
        trained_P.requires_grad_(),
        played_P,
        advantages_P,
        sample_P=torch.repeat_interleave(torch.arange(len(samples)), torch.tensor(lengths)),
        samples=len(samples),
        entropies_P=torch.zeros_like(played_P).requires_grad_(loss.uses_entropy),
    )
    _, gradients = loss(inputs, divisor(config, lengths), token_weights(config, inputs))
    found = [recovered(-each) for each in gradients.log_probabilities_P.tolist()]
    return [each.value for each in found], all(each.exact for each in found)
