"""Counts what a step's answers say of the run's health: cut at the length limit, repeated, and groups without a difference.

`orchestrator/early_warnings/rules.py` watches these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from counterpoint.orchestrator.step.advantages import differ
from counterpoint.transport.records import Rollout

LEAST_EXAMPLES = 4
"""Examples of an environment in a step without which its commonest answer says nothing."""


def answer_metrics(completed: Sequence[Rollout]) -> dict[str, float]:
    """Returns the metrics of completed rollouts, of which there is one at least. Reads their tokens: call it in a thread."""
    metrics = {"length/cut": _share(map(_is_cut, completed))}
    if groups := [group for group in _by(completed, "group_id").values() if len(group) > 1]:
        metrics["groups/no_difference"] = _share(not differ([each.reward or 0.0 for each in group]) for group in groups)
    for environment, rollouts in sorted(_by(completed, "environment").items()):
        cut = [rollout.reward or 0.0 for rollout in rollouts if _is_cut(rollout)]
        metrics[f"length/{environment}/cut"] = len(cut) / len(rollouts)
        if cut:
            metrics[f"length/{environment}/cut_reward"] = sum(cut) / len(cut)
        answers = [(rollout.group_id, _answer(rollout)) for rollout in rollouts]
        metrics[f"answers/{environment}/repeated"] = 1 - len(set(answers)) / len(answers)
        if len({rollout.example_index for rollout in rollouts}) >= LEAST_EXAMPLES:
            ((_, commonest),) = Counter(answer for _, answer in answers).most_common(1)
            metrics[f"answers/{environment}/commonest"] = commonest / len(answers)
    return metrics


def _by(rollouts: Sequence[Rollout], name: str) -> dict[object, list[Rollout]]:
    found: dict[object, list[Rollout]] = {}
    for rollout in rollouts:
        found.setdefault(getattr(rollout, name), []).append(rollout)
    return found


def _share(values: Iterable[bool]) -> float:
    found = [*values]
    return sum(found) / len(found)


def _is_cut(rollout: Rollout) -> bool:
    """Whether a turn of it ended because it was as long as it may be."""
    return any(turn.finish_reason == "length" for turn in rollout.turns)


def _answer(rollout: Rollout) -> int:
    """Returns a number that is the same for the same completions."""
    return hash(tuple(turn.completion_ids.tobytes() for turn in rollout.turns))
