"""Says what the observations mean of an environment: what works, what slows training down, and what would break in it. Pure."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from counterpoint.job.environments.observe import Observations
from counterpoint.orchestrator.rollouts.branching import ADVICE, FACTOR, branch_metrics
from counterpoint.orchestrator.rollouts.failures import kind_of
from counterpoint.orchestrator.step.step_metrics import environment_metrics
from counterpoint.run.loop_health.blame_evidence import Kind
from counterpoint.run.loop_health.stacks import NOWHERE
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.printable import shortened
from counterpoint.transport.records import Rollout
from counterpoint.transport.telemetry.agent_time import agent_times, agents_in_words

SLOW_SHARE = 0.5
"""A rollout that took this share of its deadline will miss it on a busier server."""

BLOCKED_SECONDS = 0.25
"""Code that holds the event loop for this long stalls every rollout of the run."""

GROWTH_BYTES = 64 * 1024
"""Growth of memory for each rollout after the first round. Less is noise."""

LARGE_STATE_BYTES = 64 * 1024
"""A rollout's state is recorded: more of it makes steps slower."""

FAILED_SHARE = 0.5
"""So large a share of failed rollouts leaves training too little."""

SHORTEST_SECRET = 8
SHORTEST_ANSWER = 3
"""Characters. What is shorter may be equal by chance."""

CUT_SHARE = 0.2
EQUAL_SHARE = 0.5


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    level: Level
    text: str
    """What was seen and, unless all is well, what to do."""


def findings(seen: Observations) -> list[Finding]:
    """Returns the result of every check, in the order in which a person would ask."""
    return [Finding(check, *examine(seen)) for check, examine in _CHECKS.items()]


Verdict = tuple[Level, str]

_NOT_CHECKED: Verdict = (Level.WARNING, "not checked: no rollout completed")


def _examples(seen: Observations) -> Verdict:
    if seen.changed_examples:
        numbers = ", ".join(map(str, seen.changed_examples))
        return Level.ERROR, (
            f"examples {numbers} were not equal when they were asked for again; a resumed run asks again: "
            "draw them once, in the constructor, with a seed"
        )
    return Level.OK, f"{seen.size} examples; those played were equal when they were asked for again"


def _outcomes(seen: Observations) -> Verdict:
    failed = [rollout for rollout in seen.rollouts if rollout.error is not None]
    total = len(seen.rollouts)
    if not failed:
        return Level.OK, f"all {total} rollouts completed"
    kinds = Counter(kind_of(rollout.error or "") for rollout in failed)
    shown = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3))
    level = Level.ERROR if len(failed) > FAILED_SHARE * total else Level.WARNING
    return level, f"{len(failed)} of {total} rollouts failed: {shown}; the first error: {failed[0].error}"


def _rewards(seen: Observations) -> Verdict:
    rewards = [rollout.reward for rollout in _completed(seen) if rollout.reward is not None]
    if not rewards:
        return Level.ERROR, "no rollout has a reward"
    text = f"between {min(rewards):.4g} and {max(rewards):.4g}, mean {fmean(rewards):.4g}"
    groups = [group for group in map(_rewards_of, seen.groups) if len(group) > 1]
    equal = sum(len(set(group)) == 1 for group in groups)
    if not groups or equal <= EQUAL_SHARE * len(groups):
        return Level.OK, f"{text}; equal within {equal} of {len(groups)} groups"
    advice = "a group of equal rewards teaches nothing: give partial credit, or choose easier or harder examples"
    return Level.WARNING, f"{text}; equal within {equal} of {len(groups)} groups: {advice}"


def _scoring(seen: Observations) -> Verdict:
    if not _completed(seen):
        return _NOT_CHECKED
    if not seen.changed_scores:
        if seen.not_scored_again:
            return Level.OK, (
                f"not checked for {len(seen.not_scored_again)} scores: the environment cannot be asked twice "
                f"({shortened(seen.not_scored_again[0], 200)}); {seen.scored_again} rollouts got the same reward again"
            )
        if not seen.scored_again:
            return Level.OK, "not checked: in each group a rollout failed, so that none can be scored again"
        return Level.OK, f"scoring a rollout again gives the same reward ({seen.scored_again} were scored again)"
    name, first, second = seen.changed_scores[0]
    return Level.WARNING, (
        f"{len(seen.changed_scores)} rollouts got another reward when they were scored again (rollout {name}: {first:.4g}, "
        f"then {second:.4g}): noise in the reward is noise in the gradient"
    )


def _time(seen: Observations) -> Verdict:
    if not seen.seconds:
        return Level.ERROR, "no rollout was played"
    slowest = max(each.total for each in seen.seconds)
    model, scoring = fmean(each.model for each in seen.seconds), fmean(each.scoring for each in seen.seconds)
    total = fmean(each.total for each in seen.seconds)
    text = (
        f"a rollout takes {total:.2g} s on average: {model:.2g} s in the model, {scoring:.2g} s in scoring, "
        f"{max(0.0, total - model - scoring):.2g} s in the environment; the slowest took {slowest:.2g} s"
    )
    if agents := agents_in_words(agent_times([environment_metrics(_completed(seen))])):
        text += f"; {agents}"
    if slowest > SLOW_SHARE * seen.timeout_seconds:
        return Level.WARNING, f"{text}; its deadline is rollout_timeout_seconds = {seen.timeout_seconds:g}: raise it"
    return Level.OK, text


def _event_loop(seen: Observations) -> Verdict:
    # A short one whose stack was not seen may be anybody's, on a busy machine.
    spots = [
        spot
        for spot in seen.slow_spots.by_key.values()
        if not spot.place.ours and (spot.place != NOWHERE or spot.worst > BLOCKED_SECONDS)
    ]
    if not (its_own := [spot for spot in spots if spot.kind in (Kind.CALLBACK, Kind.GIL, Kind.WAIT)]):
        return Level.OK, "nothing of the environment held the event loop"
    worst = max(its_own, key=lambda spot: spot.worst)
    level = Level.ERROR if worst.worst > BLOCKED_SECONDS else Level.WARNING
    return level, (
        f"the event loop was late by {worst.worst:.2g} s: {worst}; all rollouts of the run wait meanwhile: {worst.advice}"
    )


def _lengths(seen: Observations) -> Verdict:
    if not _completed(seen):
        return _NOT_CHECKED
    turns = [turn for rollout in _completed(seen) for turn in rollout.turns]
    if not turns:
        return Level.ERROR, "no turn was generated"
    cut = sum(turn.finish_reason == "length" for turn in turns)
    longest = max(len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns)
    rollouts = max(len(_completed(seen)), 1)
    text = f"{len(turns) / rollouts:.3g} turns a rollout; the longest sequence has {longest} tokens"
    if cut > CUT_SHARE * len(turns):
        return Level.WARNING, f"{text}; {cut} of {len(turns)} completions were cut by max_tokens: raise it"
    return Level.OK, f"{text}; {cut} of {len(turns)} completions were cut by max_tokens"


def _branches(seen: Observations) -> Verdict:
    completed = _completed(seen)
    if not completed:
        return _NOT_CHECKED
    metrics = branch_metrics(completed)
    if metrics.get(FACTOR, 1.0) == 1.0:  # exactly, where each player has one
        return Level.OK, "each rollout, or each of its players, is one sequence of tokens"
    most = max(len(rollout.branches or ()) for rollout in completed)
    return Level.WARNING, (
        f"up to {most} sequences in one rollout, {metrics[FACTOR]:.2g} times the tokens of the longest ones: a prompt that does "
        f"not extend the last turn begins a new sequence. Use `model.chat.extend` unless that is meant; {ADVICE}"
    )


def _state(seen: Observations) -> Verdict:
    if not _completed(seen):
        return _NOT_CHECKED
    largest = max(len(_state_text(rollout)) for rollout in _completed(seen))
    if largest > LARGE_STATE_BYTES:
        return (
            Level.WARNING,
            f"the largest state has {largest} bytes of JSON: every rollout is recorded; keep less in it",
        )
    return Level.OK, f"JSON of at most {largest} bytes"


def _memory(seen: Observations) -> Verdict:
    if len(seen.memory) < 3:
        return Level.OK, "not measured: that takes 3 rounds"
    rollouts = len(seen.rollouts) / len(seen.memory) * (len(seen.memory) - 2)
    # The first rounds import modules and fill caches.
    growth = (seen.memory[-1] - seen.memory[1]) / max(rollouts, 1)
    text = f"{growth / 1024:.3g} KiB more for each rollout after the second round"
    if growth > GROWTH_BYTES:
        return Level.WARNING, f"{text}: what is kept of a rollout belongs into its state, not into the environment"
    return Level.OK, text


def _leftovers(seen: Observations) -> Verdict:
    left = [
        f"{len(names)} {what} ({', '.join(map(str, names[:3]))})"
        for what, names in (
            ("tasks", seen.left_tasks),
            ("threads", seen.left_threads),
            ("processes", seen.left_processes),
        )
        if names
    ]
    if not left:
        return Level.OK, "no task, thread or process was left behind"
    return (
        Level.WARNING,
        f"after the last rollout there still were {', '.join(left)}: end them in `rollout` or in `close`",
    )


def _awaits(seen: Observations) -> Verdict:
    if seen.not_awaited:
        return Level.ERROR, "; ".join(dict.fromkeys(seen.not_awaited))
    return Level.OK, "no coroutine was left that nobody awaited"


def _answers(seen: Observations) -> Verdict:
    """Prompts that hold the answer, unless answers repeat, as those of a choice do."""
    first = {rollout.example_index: rollout.turns[0] for rollout in seen.rollouts if rollout.turns}
    prompts = (
        {}
        if seen.chat is None
        else {index: seen.chat.decode(turn.prompt_ids.tolist()) for index, turn in first.items()}
    )
    told = [index for index, prompt in prompts.items() if _holds(prompt, seen.answers.get(index, ""))]
    if len(told) > 1 and len(told) == len(prompts) and len({seen.answers[index] for index in told}) == len(told):
        shown = f"example {told[0]}: {shortened(seen.answers[told[0]], 80)!r} in {shortened(prompts[told[0]], 300)!r}"
        return Level.WARNING, f"each first prompt holds its example's answer ({shown}): the model need only copy it"
    return Level.OK, "no prompt gives the answer away"


def _holds(prompt: str, answer: str) -> bool:
    return len(answer) >= SHORTEST_ANSWER and re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", prompt) is not None


def _secrets(seen: Observations) -> Verdict:
    told = "".join(seen.printed)
    kept = "".join(_state_text(rollout) for rollout in _completed(seen))
    for name, value in os.environ.items():
        if len(value) >= SHORTEST_SECRET and re.search("KEY|TOKEN|SECRET|PASSWORD", name):
            where = "printed" if value in told else "in a rollout's state" if value in kept else ""
            if where:
                return (
                    Level.ERROR,
                    f"the value of ${name} is {where}, and so in files that others may read: leave it out",
                )
    if seen.printed:
        shown = shortened(seen.printed[0].strip(), 80)
        return Level.OK, f"it printed {len(seen.printed)} lines, such as {shown!r}; a run's log has them"
    return Level.OK, "it printed nothing"


_CHECKS: dict[str, Callable[[Observations], Verdict]] = {
    "examples": _examples,
    "outcomes": _outcomes,
    "awaits": _awaits,
    "rewards": _rewards,
    "scoring": _scoring,
    "answers": _answers,
    "time": _time,
    "event loop": _event_loop,
    "lengths": _lengths,
    "sequences": _branches,
    "state": _state,
    "secrets": _secrets,
    "memory": _memory,
    "leftovers": _leftovers,
}


def _completed(seen: Observations) -> list[Rollout]:
    return [rollout for rollout in seen.rollouts if rollout.error is None]


def _rewards_of(group: Sequence[Rollout]) -> list[float]:
    return [rollout.reward for rollout in group if rollout.error is None and rollout.reward is not None]


def _state_text(rollout: Rollout) -> str:
    return dumps(rollout.state, default=repr).decode()
