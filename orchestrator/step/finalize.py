"""Finalizes a group after its last rollout's end: check, advantages, filters. In a thread or, if it is small, on the loop.

It fails a rollout that cannot be trained on (arrays that disagree, a log-probability or reward that is not finite), with a
reason for a person, before the rollout reaches a batch. The group's other rollouts and the run continue. The dispatcher reports
the result to the scheduler as `GroupFinalized`.

Next in the reading order of `docs/architecture.md`: `orchestrator/step/boundary.py`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from counterpoint.inference.per_tick_limiter import PerTickLimiter
from counterpoint.orchestrator.credit.equal_rewards import differ
from counterpoint.orchestrator.receipts.receipt import turn_hashes
from counterpoint.orchestrator.rollouts.failures import NO_TURN, lasting_failure, lasting_failure_of_function
from counterpoint.orchestrator.rollouts.rollout_file import RolloutStateError, saved_state
from counterpoint.orchestrator.rollouts.trajectories import join_floats, merge_turns, share_tokens
from counterpoint.orchestrator.scheduling.events import GroupFinalized
from counterpoint.orchestrator.scheduling.outcomes import DropReason
from counterpoint.orchestrator.step.advantages import LARGEST_FLOAT32, Advantage, AdvantageError
from counterpoint.orchestrator.step.filters import FilterCounts, apply_filters
from counterpoint.orchestrator.step.players import fault_of_players, set_advantages
from counterpoint.run.config import FilterConfig
from counterpoint.run.loop_health.threads import advantage_in_thread, run_cpu_bound
from counterpoint.transport.process.yield_gil import yielding_gil
from counterpoint.transport.records import (
    COLUMNS,
    LOG_PROBABILITY_ROUNDING,
    TURN_COLUMNS,
    Branch,
    Rollout,
    SavedState,
    Turn,
)

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)

SMALL_ROLLOUTS, SMALL_TURNS, SMALL_TOKENS, SMALL_TEXT = 32, 64, 1 << 14, 1 << 16
"""Most rollouts, turns, tokens of their prompts and completions, and characters of their states and metrics, of a group that is
finalized on the loop, in a few milliseconds."""
_SMALL_VALUES = 32
"""Most values that a rollout of such a group has in its state, and in its metrics."""
_SMALLEST_INTEGER, _LARGEST_INTEGER = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """The result for one group."""

    event: GroupFinalized
    """The scheduler's event. `kept` rollouts have neither `error` nor `filtered_by`."""
    rollouts: Sequence[Rollout]
    """The group's rollouts, finalized."""
    failed: int = 0
    """Rollouts that had completed and were failed here."""
    caught: FilterCounts = field(default_factory=FilterCounts)
    """Rollouts that each filter caught, by environment."""


@dataclass(frozen=True, slots=True)
class Finalizer:
    """Finalizes groups by one run's configuration. A call blocks, and in a thread it rests after each rollout."""

    advantage: Advantage
    filters: Sequence[FilterConfig]
    keep_routing: bool = False
    """Keep the routing of rollouts that will not be trained on, for a dump."""

    def __call__(self, rollouts: Sequence[Rollout], group_scoring: bool) -> GroupOutcome:
        """Finalizes copies of the rollouts, as `finalize_group`: the environment may still change those that it played."""
        own = [_own(rollout) for rollout in yielding_gil(rollouts)]
        outcome = finalize_group(own, self.advantage, self.filters, group_scoring=group_scoring)
        self._reduce(outcome)
        return outcome

    async def on_loop(self, rollouts: Sequence[Rollout], group_scoring: bool) -> GroupOutcome:
        """Does the same on the loop, in three of its ticks: of each, the group takes a millisecond."""
        own = [_own(rollout) for rollout in rollouts]
        await asyncio.sleep(0)
        outcome = finalize_group(own, self.advantage, self.filters, group_scoring=group_scoring)
        await asyncio.sleep(0)
        self._reduce(outcome)
        return outcome

    def _reduce(self, outcome: GroupOutcome) -> None:
        """Leaves of the rollouts what their records and their samples need."""
        dropped = outcome.event.dropped is not None
        for rollout in outcome.rollouts:
            rollout.state, rollout.metrics = {}, {}
            if rollout.tokens is None and not any(map(_fault_of_form, rollout.turns)):
                share_tokens(rollout)
            rollout.turn_hashes = list(turn_hashes(rollout))  # here, and not while a step waits for its records
            if not self.keep_routing and (dropped or rollout.error is not None or rollout.filtered_by is not None):
                # Only its record is needed. The routing would fill memory and checkpoints.
                rollout.turns = [_without_routing(turn) for turn in rollout.turns]
                rollout.branches = None


def _own(rollout: Rollout) -> Rollout:
    """Returns a copy that the environment cannot change, its state encoded. A state that cannot be saved fails the rollout."""
    turns = {id(turn): _without_alternatives(turn.detached()) for turn in rollout.turns}
    own = rollout.with_turns([turns[id(turn)] for turn in rollout.turns])
    own.tokens = None
    if rollout.branches is not None:  # of the same turns
        own.branches = tuple(
            Branch(tuple(turns[id(turn)] for turn in branch.turns), branch.token_ids_T, branch.routed_experts)
            for branch in rollout.branches
        )
    try:
        own.saved = saved_state(own)
    except RolloutStateError as error:
        own.error = own.error or f"StateError: {error}"
        own.saved = SavedState(metrics=b"{}", state=b"{}")
    return own


def _without_alternatives(turn: Turn) -> Turn:
    """Returns the turn without the other likely tokens and the answer that holds them, which only its environment uses."""
    if turn.alternatives is None:
        return turn
    return replace(turn, alternatives=None, log_probabilities=turn.log_probabilities.copy())


def _without_routing(turn: Turn) -> Turn:
    """Returns the turn without routing. Its log-probabilities are copied: they are views of an answer that holds the routing."""
    return replace(turn, routed_experts=None, log_probabilities=turn.log_probabilities.copy())


async def finalize(
    finalizer: Finalizer, rollouts: Sequence[Rollout], group_scoring: bool, turns: PerTickLimiter
) -> GroupOutcome:
    """Finalizes a group, a small one on the loop in one of `turns`, any other in a thread.

    A thread shares the GIL with the loop: to hand it over, many times, takes longer than to finalize a small group.
    """
    await turns.turn()
    if finalizer.advantage.is_built_in and _is_small(rollouts):
        return await finalizer.on_loop(rollouts, group_scoring)
    return await finalize_in_thread(finalizer, rollouts, group_scoring)


def _is_small(rollouts: Sequence[Rollout]) -> bool:
    """Whether so little is known to be in a group, whatever its environment left, that it is finalized in no time."""
    if len(rollouts) > SMALL_ROLLOUTS:
        return False
    turns = [turn for rollout in rollouts for turn in rollout.turns[: SMALL_TURNS + 1]]
    return (
        len(turns) <= SMALL_TURNS
        and all(turn.routed_experts is None and not turn.columns for turn in turns)
        and sum(turn.prompt_ids.size + turn.completion_ids.size for turn in turns) <= SMALL_TOKENS
        and sum(_characters(rollout.state) + _characters(rollout.metrics) for rollout in rollouts) <= SMALL_TEXT
    )


def _characters(values: object) -> float:
    """Returns those of the names and texts in a dictionary of a few numbers and texts; infinite for any other value."""
    if type(values) is not dict or len(values) > _SMALL_VALUES:
        return math.inf
    if not values:  # as the metrics of most rollouts
        return 0
    values = values.copy()  # a thread that the environment has left behind may change it meanwhile
    if not all(type(name) is str for name in values) or not all(map(_is_plain, values.values())):
        return math.inf
    return sum(map(len, values)) + sum(len(value) for value in values.values() if type(value) is str)


def _is_plain(value: object) -> bool:
    if type(value) is int:
        return _SMALLEST_INTEGER <= value <= _LARGEST_INTEGER
    return value is None or type(value) in (bool, float, str)


async def finalize_in_thread(finalizer: Finalizer, rollouts: Sequence[Rollout], group_scoring: bool) -> GroupOutcome:
    """Finalizes a group in a thread. An operator's advantage function may hang, so it has separate threads."""
    if finalizer.advantage.is_built_in:
        return await run_cpu_bound(finalizer, rollouts, group_scoring)
    return await advantage_in_thread(finalizer, rollouts, group_scoring)


def finalize_group(
    rollouts: Sequence[Rollout], advantage: Advantage, filters: Sequence[FilterConfig], *, group_scoring: bool = False
) -> GroupOutcome:
    """Finalizes all rollouts of one group, failed ones included, after scoring. Sets their `error`, `advantage`, `filtered_by`.

    With `group_scoring` one failed rollout drops the whole group, since the others' rewards are relative to it. Never raises
    for bad data or a failing advantage function: such a group is dropped, and `event.dropped` and `event.detail` say why.
    """
    group_id = rollouts[0].group_id
    survivors = [rollout for rollout in rollouts if rollout.error is None]
    # The others of a group that is scored as one were not scored, which is no fault of theirs.
    failed = _fail_the_faulty(survivors, advantage) if not group_scoring or len(survivors) == len(rollouts) else 0
    if (drop := _reason_to_drop(rollouts, group_scoring)) is not None:
        failure = lasting_failure(rollouts) if drop[0] is DropReason.FAILED else None
        return GroupOutcome(GroupFinalized(group_id, 0, 0, *drop, failure=failure), rollouts, failed)

    survivors = [rollout for rollout in rollouts if rollout.error is None]
    try:
        set_advantages(advantage, survivors)
    except AdvantageError as error:
        for rollout in survivors:
            rollout.error = str(error)
        failure = lasting_failure_of_function(error)
        dropped = GroupFinalized(group_id, 0, 0, DropReason.ADVANTAGE, str(error), failure=failure)
        return GroupOutcome(dropped, rollouts, failed + len(survivors))
    caught = apply_filters(filters, survivors)
    filtered = sum(rollout.filtered_by is not None for rollout in survivors)
    rewards = tuple(rollout.reward for rollout in survivors if rollout.reward is not None)
    detail = _why_filtered(survivors) if filtered == len(survivors) else ""
    event = GroupFinalized(group_id, len(survivors) - filtered, filtered, detail=detail, rewards=rewards)
    return GroupOutcome(event, rollouts, failed, caught)


def _why_filtered(rollouts: Sequence[Rollout]) -> str:
    """Returns which filters caught the rollouts, for a person."""
    caught = Counter(rollout.filtered_by for rollout in rollouts)
    text = ", ".join(f"{count} by {kind}" for kind, count in caught.most_common())
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    if "zero_advantage" in caught and not differ(rewards):
        text += f" (each has the reward {rewards[0]:g}, and a group learns from differences)"
    return text


def _reason_to_drop(rollouts: Sequence[Rollout], group_scoring: bool) -> tuple[DropReason, str] | None:
    """Returns why the whole group is dropped, with a detail for a person, or None if it is not."""
    failures = [rollout for rollout in rollouts if rollout.error is not None]
    inference_failed = all(rollout.inference_failed for rollout in failures)
    if len(failures) == len(rollouts):
        reason = DropReason.INFERENCE_FAILED if inference_failed else DropReason.FAILED
        return reason, f"no rollout of {len(rollouts)} survived; the first error: {failures[0].error}"
    if group_scoring and failures:
        first = failures[0]
        reason = DropReason.INFERENCE_FAILED if inference_failed else DropReason.INCOMPLETE
        return reason, f"scored as a group, and rollout {first.rollout_id} failed: {first.error}"
    return None


def _fail_the_faulty(rollouts: Sequence[Rollout], advantage: Advantage) -> int:
    """Sets `error` of a group's completed rollouts that have a fault (`find_fault`, `Advantage.fault_of`); returns their number.

    It reads the values of the whole group in one go, and only searches them for the culprit if something is wrong. For each
    rollout, numpy would release the GIL, which takes a switch interval to get back beside a busy loop.
    """
    for rollout in yielding_gil(rollouts):
        rollout.error = _fault_of_structure(rollout) or advantage.fault_of(rollout)
    merged = [rollout for rollout in rollouts if rollout.error is None]
    if not _has_sound_values(merged):
        for rollout in merged:
            rollout.error = _fault_of_values(rollout)
    return sum(rollout.error is not None for rollout in rollouts)


def find_fault(rollout: Rollout) -> str | None:
    """Returns why a completed rollout cannot be trained on, for a person, or None if it can: its turns are then merged."""
    return _fault_of_structure(rollout) or _fault_of_values(rollout)


def _fault_of_structure(rollout: Rollout) -> str | None:
    if (fault := fault_of_players(rollout)) is not None:
        return fault
    if rollout.reward is None or not math.isfinite(rollout.reward):
        return f"the reward is {rollout.reward!r}; expected a finite number"
    if abs(rollout.reward) > LARGEST_FLOAT32:
        return f"the reward is {rollout.reward!r}; expected at most {LARGEST_FLOAT32:.2g} in size"
    if not rollout.turns:
        return f"{NO_TURN}; expected at least one model call"
    if (fault := _fault_of_turn_rewards(rollout)) is not None:
        return fault
    for index, turn in enumerate(rollout.turns):
        fault = (
            _fault_of_form(turn)
            or _fault_of_routing(turn, rollout.turns[0])
            or _fault_of_columns(turn, rollout.turns[0])
        )
        if fault is not None:
            return f"turn {index}: {fault}"
    if not any(len(turn.completion_ids) for turn in rollout.turns):
        return "no turn has a completion token; there is nothing to train on"
    try:
        merge_turns(rollout)
    except ValueError as error:  # checked now, before a batch counts the rollout
        return str(error)
    return None


def _fault_of_turn_rewards(rollout: Rollout) -> str | None:
    rewards = rollout.turn_rewards
    if rewards is None:
        return None
    if rewards.dtype != _FLOAT32 or rewards.shape != (len(rollout.turns),):
        shape, dtype = rewards.shape, rewards.dtype
        return f"turn_rewards has shape {shape} of {dtype} for {len(rollout.turns)} turns; expected a float32 each"
    if not np.isfinite(rewards).all():
        index = int((~np.isfinite(rewards)).argmax())
        return f"the reward of turn {index} is {rewards[index]}; expected a finite number"
    # Their sums from any turn to any other are rewards, too.
    if (size := math.fsum(map(abs, rewards.tolist()))) > LARGEST_FLOAT32:
        return f"the rewards of turns add up to {size:.2g} in size; expected at most {LARGEST_FLOAT32:.2g}"
    return None


def _has_sound_values(rollouts: Sequence[Rollout]) -> bool:
    """Whether all tokens and log-probabilities are in order, for certain."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    if any(turn.log_probabilities.dtype != _FLOAT32 for turn in turns):
        return False
    tokens = np.frombuffer(
        b"".join(rollout.tokens.data for rollout in rollouts if rollout.tokens is not None), np.int32
    )
    every = join_floats(turn.log_probabilities for turn in turns)
    # Compared as they are: NaN is not above minus infinity, either.
    return bool((tokens >= 0).all() and ((every > -np.inf) & (every <= LOG_PROBABILITY_ROUNDING)).all())


def _fault_of_values(rollout: Rollout) -> str | None:
    return _fault_of_tokens(rollout) or _fault_of_log_probabilities(rollout.turns)


def _fault_of_form(turn: Turn) -> str | None:
    for name, array in (("prompt_ids", turn.prompt_ids), ("completion_ids", turn.completion_ids)):
        if array.ndim != 1 or array.dtype != _INT32:
            return f"{name} has shape {array.shape} and dtype {array.dtype}; expected one dimension of int32"
    if not 0 < turn.temperature < math.inf:
        return f"temperature is {turn.temperature}; expected a positive, finite number"
    if not turn.prompt_ids.size:
        return "prompt_ids is empty; expected at least one token"
    if turn.log_probabilities.shape != turn.completion_ids.shape:
        return f"{turn.log_probabilities.size} log_probabilities for {turn.completion_ids.size} completion_ids; expected one each"
    if turn.untrained and (len(turn.untrained) != turn.completion_ids.size or turn.untrained.translate(None, b"\0\1")):
        return (
            f"untrained has {len(turn.untrained)} bytes for {turn.completion_ids.size} completion_ids; expected none, or a 0 or "
            "1 each, as leave_untrained sets them"
        )
    return None


def _fault_of_tokens(rollout: Rollout) -> str | None:
    """Checks every token once. Reads the turns, which repeat tokens, only for the message."""
    assert rollout.tokens is not None
    if rollout.tokens.min() >= 0:
        return None
    for index, turn in enumerate(rollout.turns):
        for name, array in (("prompt_ids", turn.prompt_ids), ("completion_ids", turn.completion_ids)):
            if array.size and array.min() < 0:
                return f"turn {index}: {name} holds the token {array.min()}; expected 0 or more"
    raise AssertionError("a rollout holds only what a turn holds")


def _fault_of_log_probabilities(turns: Sequence[Turn]) -> str | None:
    every = np.concatenate([turn.log_probabilities for turn in turns])
    if np.isfinite(every).all() and every.max() <= LOG_PROBABILITY_ROUNDING:
        return None
    for index, turn in enumerate(turns):
        for position, value in enumerate(turn.log_probabilities.tolist()):
            if not math.isfinite(value):
                return f"turn {index}: log_probabilities[{position}] is {value}; expected a finite number"
            if value > LOG_PROBABILITY_ROUNDING:
                return f"turn {index}: log_probabilities[{position}] is {value}; expected 0 or less"
    raise AssertionError("one of them is wrong")


def _fault_of_columns(turn: Turn, first: Turn) -> str | None:
    if not isinstance(turn.columns, dict):
        return f"columns is of type {type(turn.columns).__name__}; expected a dict"
    if turn.columns.keys() != first.columns.keys():
        own, others = (sorted(map(str, each.columns)) for each in (turn, first))
        return f"it has the columns {own}, turn 0 has {others}; expected the same"
    for name, values in turn.columns.items():
        if name not in TURN_COLUMNS or not isinstance(values, np.ndarray):
            return (
                f"columns holds {type(values).__name__} as {name!r:.80}; expected arrays by the names "
                f"{', '.join(TURN_COLUMNS)}. What an environment notes of its own goes into the rollout's state"
            )
        column = COLUMNS[name]
        if values.dtype != column.dtype or values.shape != turn.completion_ids.shape:
            return (
                f"{name} has shape {values.shape} and dtype {values.dtype} for {turn.completion_ids.size} completion_ids; "
                f"expected a {column.dtype.__name__} each"
            )
        if (bad := column.bad(values)).any():
            return f"{name}[{bad.argmax()}] is {values[bad.argmax()]}; expected {column.expected}"
    return None


def _fault_of_routing(turn: Turn, first: Turn) -> str | None:
    if (turn.routed_experts is None) != (first.routed_experts is None):
        return "routed_experts is there in some turns and missing in others; expected all or none"
    if turn.routed_experts is None or first.routed_experts is None:
        return None
    shape, dtype = turn.routed_experts.shape, turn.routed_experts.dtype
    if len(shape) != 3 or dtype not in (np.uint8, np.uint16):
        return (
            f"routed_experts has shape {shape} and dtype {dtype}; expected [tokens, layers, top_k] of uint8 or uint16"
        )
    if shape[1:] != first.routed_experts.shape[1:] or dtype != first.routed_experts.dtype:
        return (
            f"routed_experts has layers and top_k {shape[1:]} of {dtype}; "
            f"turn 0 has {first.routed_experts.shape[1:]} of {first.routed_experts.dtype}"
        )
    return None
