"""Plans the passes of one step over the batch: measurements, if a column needs them, and then one pass for each update.

A measurement computes, without gradient and with the weights before the step, what stays fixed while the step's updates change
them. Each mini-batch has its own, so that its rows are those of its update: in bfloat16 another row, and another prompt that
samples share in it, is another rounding, which would move the ratios off 1 before the weights have moved.

The samples with a trained token are dealt to the mini-batches in turn: the first of each rollout by their order in the batch,
then the second of each, and so on. So a group of rollouts, whose samples are neighbours, is spread over all of them, and so are
the samples of each player; and the mini-batches depend neither on the packing nor on the number of ranks. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from counterpoint.run.trained import TrainedRun, TrainingConfig

OLD, REFERENCE, VALUES = "old", "reference", "values"
"""The columns that a measurement may compute: log-probabilities under the weights before the step, under the reference policy,
and the value head's estimates before the step."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over samples of a step's batch."""

    samples: tuple[int, ...]
    """Indices into the batch; each has a trained token."""
    trained_tokens: int
    """The trained tokens of these samples, on all ranks; an update's loss is divided by it."""
    measures: bool = False
    """Whether this is a measurement, which changes no weight."""
    first_epoch: bool = True
    """Whether no pass before it has trained these samples."""


def columns_to_measure(config: TrainingConfig) -> tuple[str, ...]:
    """Returns the columns that the steps of a run with this configuration measure before the first update."""
    reference, head = config.reference, config.value_head
    wanted = {
        OLD: config.updates_per_step > 1 or (reference is not None and reference.reward_coefficient > 0),
        REFERENCE: reference is not None,
        VALUES: head is not None,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def plan_passes(
    config: TrainingConfig, rollouts: Sequence[str], trained: Mapping[int, int], measured: Collection[str]
) -> list[Pass]:
    """Returns the passes of a step, in order; none for a batch without a trained token.

    Args:
        config: of the run.
        rollouts: of each sample of the batch, the id of its rollout.
        trained: the samples with a trained token, ascending, and how many they have.
        measured: the columns to measure.
    """
    if not trained:
        return []
    samples, dealt = tuple(trained), config.updates_per_step // config.epochs
    in_turn = _order_of_dealing(samples, rollouts)
    mini_batches = [tuple(sorted(in_turn[first::dealt])) for first in range(min(dealt, len(samples)))]
    updates = [Pass(own, sum(trained[sample] for sample in own)) for own in mini_batches]
    return [
        *(replace(each, measures=True) for each in updates if measured),
        *(replace(each, first_epoch=epoch == 0) for epoch in range(config.epochs) for each in updates),
    ]


def _order_of_dealing(samples: Iterable[int], rollouts: Sequence[str]) -> list[int]:
    """Returns the samples in the order in which they are dealt: the first of each rollout, then the second of each, and so on.

    Dealt as in the batch, the samples of a game of two would give one player to every second update.
    """
    before: Counter[str] = Counter()
    place = {}
    for sample in samples:
        place[sample] = before[rollouts[sample]]
        before[rollouts[sample]] += 1
    return sorted(place, key=place.__getitem__)


def optional_inputs(config: TrainedRun) -> list[str]:
    """Returns which of the optional inputs of a loss (`LossInputs`) a run with this configuration has."""
    wanted = {
        "old_log_probabilities_P": config.training.updates_per_step > 1,
        "reference_log_probabilities_P": config.training.reference is not None,
        "teacher_log_probabilities_P": config.teacher is not None,
        "values_P": config.training.value_head is not None,
    }
    return [name for name, is_wanted in wanted.items() if is_wanted]
