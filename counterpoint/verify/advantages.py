"""Computes advantages anew from recorded rewards and lengths, by the formulas of `docs/algorithms.md`: of built-in functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from counterpoint.verify.formats import AdvantageRule, Played, RecordedTurn, Rules
from counterpoint.verify.report import Verdict

Values = npt.NDArray[np.float64]

OF_GROUP = ("group_mean", "standardised", "leave_one_out")
OVER_STEP = ("batch_standardised", "group_mean_batch_scaled")

_TOLERANCE = 1e-6


def check_advantages(step: int, recorded: Sequence[Played], rules: Sequence[Rules], report: Verdict) -> None:
    """Compares the advantages of a step's shipped rollouts with those by one of the `rules` that were in force, newest first."""
    shipped = [each for each in recorded if each.advantage_kind]
    unknown = {each.advantage_kind for each in shipped} - {*OF_GROUP, *OVER_STEP}
    for kind in sorted(unknown):
        count = sum(each.advantage_kind == kind for each in shipped)
        report.unchecked[f"advantages by {kind!r:.60}, which is no function that the checker computes"] += count
    shipped = [each for each in shipped if each.advantage_kind not in unknown]
    wrong: dict[str, str] = {}
    for rule in rules:
        expected = _expected(shipped, rule.advantage)
        found = {each.rollout_id: fault for each in shipped if (fault := _fault(each, expected[each.rollout_id]))}
        # Groups that were finalized before a change of the rules have the former ones.
        wrong = found if rule is rules[0] else {name: fault for name, fault in wrong.items() if name in found}
    for name, fault in wrong.items():
        report.damage(f"rollouts/step_{step}/rollouts.jsonl", fault, step, name)
    report.checked["advantages"] += len(shipped)


def base_advantages(recorded: Sequence[Played], rule: AdvantageRule) -> dict[str, dict[str, float]]:
    """Returns the advantage of each rollout and player relative to its group; without players the player is empty."""
    groups: defaultdict[int, list[Played]] = defaultdict(list)
    for each in recorded:
        groups[each.group_id].append(each)
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for members in groups.values():
        players = sorted({player for each in members for player in each.player_rewards})
        for player in players or [""]:
            own = [(each, turns) for each in members if (turns := _turns(each, player)) or not player]
            if not own:
                continue
            kinds = [each.advantage_kind for each, _ in own]
            rewards = np.array([_reward(each, player) for each, _ in own], np.float64)
            rewards = _penalised(rewards, [[turn.completion_tokens for turn in turns] for _, turns in own], rule)
            for (each, _), value in zip(own, _of_group(kinds[0], rewards).tolist(), strict=True):
                found[each.rollout_id][player] = value
    return found


def _expected(recorded: Sequence[Played], rule: AdvantageRule) -> dict[str, dict[str, float]]:
    found = base_advantages(recorded, rule)
    trained = [each for each in recorded if each.is_trained]
    for kind in OVER_STEP:
        of_kind = [each for each in trained if each.advantage_kind == kind]
        for player in sorted({player for each in of_kind for player in found[each.rollout_id]}):
            names = [each.rollout_id for each in of_kind if player in found[each.rollout_id]]
            values = np.array([found[name][player] for name in names])
            centred = _centred(values) if kind == "batch_standardised" else values
            for name, value in zip(names, _over_deviation(centred, values).tolist(), strict=True):
                found[name][player] = value
    return found


def _fault(each: Played, expected: dict[str, float]) -> str | None:
    """Returns how a recorded advantage differs from the expected ones by player, for a person."""
    said = each.player_advantages or {"": each.advantage}
    if said.keys() != expected.keys():
        return f"it has advantages of {sorted(said)}; expected {sorted(expected)}"
    for player, value in expected.items():
        if not abs(said[player] - value) <= _TOLERANCE * max(1.0, abs(value)):
            return f"its advantage is {said[player]}; its group's rewards give {value:.9g}"
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
