"""Computes advantages anew from recorded rewards and lengths, by the formulas of `docs/algorithms.md`: of built-in functions."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import numpy.typing as npt
from msgspec import json

from counterpoint.verify.formats import AdvantageRule, Played, RecordedTurn
from counterpoint.verify.records import Step

Values = npt.NDArray[np.float64]

OF_GROUP = ("group_mean", "standardised", "leave_one_out")
OVER_STEP = ("batch_standardised", "group_mean_batch_scaled")
BY_TURN = ("turn_returns", "anchor_states")

_TOLERANCE = 1e-6


def check_advantages(step: Step) -> None:
    """Compares the advantages of a step's shipped rollouts with those by one of the rules that were in force."""
    shipped = [each for each in step.recorded if each.advantage_kind]
    unknown = {each.group_id: why for each in shipped if (why := _why_unknown(each))}
    for each in shipped:
        step.report.count(each.group_id not in unknown, "advantages", unknown.get(each.group_id, ""))
    shipped = [each for each in shipped if each.group_id not in unknown]
    expected = [_expected(shipped, rule.advantage) for rule in step.rules]
    for each in shipped:
        faults = [_fault(each, by_rule[each.rollout_id]) for by_rule in expected]
        # Groups that were finalized before a change of the rules have the former ones.
        if faults[0] and all(faults):
            step.damage(faults[0], each.rollout_id)


def _why_unknown(each: Played) -> str:
    if each.advantage_kind not in {*OF_GROUP, *OVER_STEP, *BY_TURN}:
        return f"advantages by {each.advantage_kind!r:.60}, which is no function that the checker computes"
    if each.advantage_kind == "anchor_states" and _states(each) is None:
        return "advantages by states of turns that are not recorded whole"
    return ""


def base_advantages(recorded: list[Played], rule: AdvantageRule) -> dict[str, dict[str, Values]]:
    """Returns the advantages of each rollout and player relative to its group, of the whole or of each of the player's turns.

    Without players the player is empty.
    """
    groups: defaultdict[tuple[int, str], list[Played]] = defaultdict(list)
    for each in recorded:
        for player in each.player_rewards or [""]:
            if not player or _turns(each, player):
                groups[each.group_id, player].append(each)
    found: defaultdict[str, dict[str, Values]] = defaultdict(dict)
    for (_, player), own in groups.items():
        kind, turns = own[0].advantage_kind, [_turns(each, player) for each in own]
        given = np.array([each.player_rewards.get(player, each.reward or 0.0) for each in own], np.float64)
        rewards = _penalised(given, [[turn.completion_tokens for turn in each] for each in turns], rule)
        if kind in BY_TURN:
            of_turns = list(map(_rewards_of_turns, turns, rewards.tolist(), (rewards - given).tolist()))
            states = [_states(each, player) or [] for each in own] if kind == "anchor_states" else []
            values = _of_turns(of_turns, states, rule.discount)
        else:
            values = list(_of_group(kind, rewards)[:, None])
        for each, value in zip(own, values, strict=True):
            found[each.rollout_id][player] = value
    return found


def _expected(recorded: list[Played], rule: AdvantageRule) -> dict[str, dict[str, Values]]:
    found = base_advantages(recorded, rule)
    for kind in OVER_STEP:
        of_kind = [found[each.rollout_id] for each in recorded if each.is_trained and each.advantage_kind == kind]
        for player in {player for each in of_kind for player in each}:
            own = [each for each in of_kind if player in each]
            values = np.concatenate([each[player] for each in own])
            scaled = _over_deviation(_centred(values) if kind == "batch_standardised" else values)
            for each, value in zip(own, scaled, strict=True):
                each[player] = value[None]
    return found


def _fault(each: Played, expected: dict[str, Values]) -> str | None:
    """Returns how a recorded advantage differs from the expected ones by player, for a person."""
    said = each.player_advantages or {"": each.advantage}
    if said.keys() != expected.keys():
        return f"it has advantages of {sorted(said)}; expected {sorted(expected)}"
    for player, values in expected.items():
        largest = values[np.isclose(np.abs(values), np.abs(values).max(), _TOLERANCE, _TOLERANCE)]
        if not np.isclose(largest, said[player], _TOLERANCE, _TOLERANCE).any():
            return f"its advantage is {said[player]}; its group's rewards give {largest[0]:.9g}"
        turns = [turn.advantage for turn in _turns(each, player)] if each.advantage_kind in BY_TURN else []
        for turn, (of_turn, value) in enumerate(zip(turns, values.tolist(), strict=bool(turns))):
            if of_turn is None or not np.isclose(value, of_turn, _TOLERANCE, _TOLERANCE):
                return f"the advantage of turn {turn} is {of_turn}; the rewards of its group's turns give {value:.9g}"
    return None


def _turns(each: Played, player: str) -> list[RecordedTurn]:
    return [turn for turn in each.turns if not player or turn.player == player]


def _penalised(rewards: Values, lengths: list[list[int]], rule: AdvantageRule) -> Values:
    """Returns rewards less the penalties for length, of a group."""
    if (overlong := rule.overlong) is not None:
        beyond = np.array([max(each, default=0) for each in lengths]) - (overlong.longest - overlong.buffer)
        rewards = rewards - overlong.penalty * np.clip(beyond / overlong.buffer, 0, 1)
    totals, coefficient, best = np.array([sum(each) for each in lengths]), rule.length_penalty, rewards.max()
    if coefficient == 0 or best <= 0:
        return rewards
    won = rewards >= best - 1e-6 * abs(best)
    most = coefficient * min(1.0, max(0.0, float(rewards.mean())))
    if not won.all():
        most = min(most, (best - rewards[~won].max()) / 2)
    return np.where(won, rewards - most * totals / max(1, totals[won].max()), rewards)


def _rewards_of_turns(turns: list[RecordedTurn], reward: float, penalty: float) -> Values:
    """Returns the rewards of a rollout's turns: their own, of which the last has the penalty, else the whole at the last one."""
    if any(turn.reward is None for turn in turns):
        return np.array([0.0] * (len(turns) - 1) + [reward])
    own = np.array([turn.reward for turn in turns], np.float32)
    own[-1] += np.float32(penalty)
    return own.astype(np.float64)


def _states(each: Played, player: str = "") -> list[object] | None:
    """Returns a key for the state in which each turn of a player began: as noted, else its prompt. None if it is not known."""
    state = json.decode(each.state, type=dict[str, object])
    noted = state.get("turn_states")
    if noted is None and "(others)" not in state:
        keys: list[object] = [turn.prompt_hash for turn in each.turns]
    elif isinstance(noted, list) and len(noted) == len(each.turns):
        keys = [json.encode(value, order="deterministic") for value in noted]
    else:
        return None
    own = [key for key, turn in zip(keys, each.turns, strict=True) if not player or turn.player == player]
    return None if None in own else own


def _of_turns(rewards: list[Values], states: list[list[object]], discount: float) -> list[Values]:
    """Returns each turn's return less the mean of the others' in the same of `states`, or else from the same number on."""
    for own in rewards:
        for turn in range(len(own) - 2, -1, -1):
            own[turn] += discount * own[turn + 1]
    alike: defaultdict[object, list[tuple[int, float]]] = defaultdict(list)
    for rollout, keys in enumerate(states):
        for key, value in zip(keys, rewards[rollout].tolist(), strict=True):
            alike[key].append((rollout, value))
    found = [np.zeros_like(own) for own in rewards]
    for rollout, own in enumerate(rewards):
        for turn in range(len(own)):
            compared = alike[states[rollout][turn]] if states else []
            if {owner for owner, _ in compared} <= {rollout}:
                compared = [(owner, other[min(turn, len(other) - 1)]) for owner, other in enumerate(rewards)]
            others = [value for owner, value in compared if owner != rollout]
            if others and _differ(np.array([value for _, value in compared])):
                found[rollout][turn] = own[turn] - np.mean(others)
    return found


def _of_group(kind: str, rewards: Values) -> Values:
    if kind == "standardised":
        return _over_deviation(_centred(rewards))
    if kind == "leave_one_out":
        return _centred(rewards) * (len(rewards) / max(1, len(rewards) - 1))
    return rewards if kind == "batch_standardised" else _centred(rewards)


def _centred(values: Values) -> Values:
    return values - values.mean() if _differ(values) else np.zeros_like(values)


def _over_deviation(values: Values) -> Values:
    return values / values.std() if _differ(values) else np.zeros_like(values)


def _differ(values: Values) -> bool:
    return bool(np.ptp(values) > 1e-6 * np.abs(values).max())
