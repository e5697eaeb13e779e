"""Computes advantages anew from recorded rewards and lengths, by the formulas of `docs/algorithms.md`: of built-in functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

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
    unknown: dict[int, str] = {}
    for each in shipped:
        if each.advantage_kind not in {*OF_GROUP, *OVER_STEP, *BY_TURN}:
            unknown[each.group_id] = (
                f"advantages by {each.advantage_kind!r:.60}, which is no function that the checker computes"
            )
        elif each.advantage_kind == "anchor_states" and _states(each) is None:
            unknown[each.group_id] = "advantages by states of turns that are not recorded whole"
    for each in shipped:
        step.report.count(each.group_id not in unknown, "advantages", unknown.get(each.group_id, ""))
    shipped = [each for each in shipped if each.group_id not in unknown]
    wrong: dict[str, str] = {}
    for rule in step.rules:
        expected = _expected(shipped, rule.advantage)
        found = {each.rollout_id: fault for each in shipped if (fault := _fault(each, expected[each.rollout_id]))}
        # Groups that were finalized before a change of the rules have the former ones.
        wrong = found if rule is step.rules[0] else {name: fault for name, fault in wrong.items() if name in found}
    for name, fault in wrong.items():
        step.damage(fault, name)


def base_advantages(recorded: Sequence[Played], rule: AdvantageRule) -> dict[str, dict[str, Values]]:
    """Returns the advantages of each rollout and player relative to its group, of the whole or of each of the player's turns.

    Without players the player is empty.
    """
    groups: defaultdict[int, list[Played]] = defaultdict(list)
    for each in recorded:
        groups[each.group_id].append(each)
    found: defaultdict[str, dict[str, Values]] = defaultdict(dict)
    for members in groups.values():
        players = sorted({player for each in members for player in each.player_rewards})
        for player in players or [""]:
            own = [(each, turns) for each in members if (turns := _turns(each, player)) or not player]
            if not own:
                continue
            kind = own[0][0].advantage_kind
            given = np.array([_reward(each, player) for each, _ in own], np.float64)
            lengths = [[turn.completion_tokens for turn in turns] for _, turns in own]
            rewards = _penalised(given, lengths, rule)
            if kind in BY_TURN:
                turn_rewards = [
                    _rewards_of_turns(turns, reward, reward - before)
                    for (_, turns), reward, before in zip(own, rewards.tolist(), given.tolist(), strict=True)
                ]
                states = [_states(each, player) or [] for each, _ in own] if kind == "anchor_states" else []
                values = _of_turns(turn_rewards, states, rule.discount)
            else:
                values = list(_of_group(kind, rewards)[:, None])
            for (each, _), value in zip(own, values, strict=True):
                found[each.rollout_id][player] = value
    return found


def _expected(recorded: Sequence[Played], rule: AdvantageRule) -> dict[str, dict[str, Values]]:
    found = base_advantages(recorded, rule)
    trained = [each for each in recorded if each.is_trained]
    for kind in OVER_STEP:
        of_kind = [each for each in trained if each.advantage_kind == kind]
        for player in sorted({player for each in of_kind for player in found[each.rollout_id]}):
            names = [each.rollout_id for each in of_kind if player in found[each.rollout_id]]
            values = np.concatenate([found[name][player] for name in names])
            centred = _centred(values) if kind == "batch_standardised" else values
            for name, value in zip(names, _over_deviation(centred, values), strict=True):
                found[name][player] = value[None]
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
    if player and player not in each.player_rewards:
        return []
    return [turn for turn in each.turns if not player or turn.player == player]


def _reward(each: Played, player: str) -> float:
    return each.player_rewards[player] if player else each.reward or 0.0


def _penalised(rewards: Values, lengths: Sequence[list[int]], rule: AdvantageRule) -> Values:
    """Returns rewards less the penalties for length, of a group."""
    if (overlong := rule.overlong) is not None:
        longest = np.array([max(each, default=0) for each in lengths])
        over = (longest - (overlong.longest - overlong.buffer)) / overlong.buffer
        rewards = rewards - overlong.penalty * np.clip(over, 0, 1)
    totals, coefficient, best = np.array([sum(each) for each in lengths]), rule.length_penalty, rewards.max()
    if coefficient == 0 or best <= 0:
        return rewards
    won = rewards >= best - 1e-6 * abs(best)
    most = coefficient * min(1.0, max(0.0, float(rewards.mean())))
    if not won.all():
        most = min(most, (best - rewards[~won].max()) / 2)
    return np.where(won, rewards - most * totals / max(1, totals[won].max()), rewards)


def _rewards_of_turns(turns: Sequence[RecordedTurn], reward: float, penalty: float) -> Values:
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
    if kind == "batch_standardised":
        return rewards
    centred = _centred(rewards)
    if kind == "standardised":
        return _over_deviation(centred, centred)
    if kind == "leave_one_out":
        return centred * (len(rewards) / (len(rewards) - 1)) if len(rewards) > 1 else centred * 0
    return centred


def _centred(values: Values) -> Values:
    return values - values.mean() if _differ(values) else np.zeros_like(values)


def _over_deviation(values: Values, of: Values) -> Values:
    """Returns values over the deviation of `of`, or zeros if these are equal."""
    return values / of.std() if _differ(of) else np.zeros_like(values)


def _differ(values: Values) -> bool:
    return bool(values.max() - values.min() > 1e-6 * np.abs(values).max()) if len(values) else False
