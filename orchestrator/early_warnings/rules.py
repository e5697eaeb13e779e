"""The rules: each a pure function of the metrics so far, which yields what goes wrong, with its figure and what to do.

A healthy run has none, however its numbers scatter: so a rule takes the median of several steps, compares a run with itself where
it can, and is silent about a reward that is nearly the greatest seen. docs/metrics.md has them in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from counterpoint.orchestrator.early_warnings.seen import NEWEST, FittedLine, Seen, trend


class Sign(StrEnum):
    """What goes wrong."""

    CUT = "cut"
    ENTROPY = "entropy"
    STALE_WEIGHTS = "stale-weights"
    MASKED = "masked"
    GRADIENT_CLIPPED = "gradient-clipped"
    HELD_OUT = "held-out"
    TRADE_OFF = "trade-off"
    PLATEAU = "plateau"
    DRIFT = "drift"
    PARTS = "parts"
    CONSTANT_ANSWER = "constant-answer"
    REPEATED = "repeated"
    FEW_DIFFERENCES = "few-differences"


@dataclass(frozen=True, slots=True)
class FoundSign:
    """What a rule has found."""

    sign: Sign
    figure: float
    """The number that it goes by."""
    reason: str
    advice: str
    about: str = ""
    """The environment, the evaluation or the parts that it is about; empty for the whole run."""


NEW = 5
"""Newest steps whose median is a run's present value."""

SOLVED, NEARLY = 0.9, 0.8
"""A mean reward this far from the least to the greatest that was seen leaves little to learn, or little to rise by."""

MOST_CUT, NOTABLE_CUT, LOWER = 0.9, 0.1, 0.1
"""Shares of cut answers: from the first on they are a problem; from the second on, if their mean reward is lower than the others'
by so much of the range of rewards."""

RAMP = 12
"""Steps within which a run that begins may still find its form, or a share fall by itself."""

COLLAPSE, EXPLOSION, EXPLOSION_NATS = 0.1, 1.5, 0.5
"""Entropy, times that of the first steps: below the first, or above the second and by so many nats."""

LEAST_EFFECTIVE = 0.5
"""The effective sample size, as a share of the tokens, below which half the batch is lost to the weights' noise."""

MOST_MASKED = 0.3
"""A larger share of tokens without a gradient is more than a bound for outliers."""

CLIPPED_STEPS, LEAST_KEPT = 20, 0.5
"""The gradient was clipped at each of so many steps, and in the median to less than this."""

NOTABLE_FALL = 0.05
"""A score has fallen by this share of its best at least: the best of many is the best by chance, too."""

PLATEAU_STEPS, CERTAIN, LITTLE = (80, NEWEST), 2.0, 0.1
"""Over one of these numbers of steps the reward rises, even by so many standard errors more than it seems, by less than this
share of the range of rewards."""

SURE = 5.0
"""Standard errors of a trend that two metrics share."""

MOST_DRIFT = 0.5
"""Nats a token between policy and reference: the policy writes what the reference hardly would."""

OPPOSED_STEPS, NOTABLE_MOVE = 40, 0.1
"""Steps over which two rewards move apart, and the least that each moves, as a share of the range of values seen."""

MOST_REPEATED, MOST_ALIKE, MOST_EQUAL = 0.8, 0.8, 0.75
"""Shares: of answers that repeat a sibling's, of answers that another example got, too, and of groups without a difference."""


def is_solved(seen: Seen, count: int = NEW, share: float = SOLVED) -> bool:
    """Returns whether the mean reward is nearly the greatest that any rollout had, by this share of the way from the least."""
    least, greatest = _range_of_rewards(seen)
    newest = seen.newest("reward/mean", count)
    return bool(newest) and greatest > least and (median(newest) - least) / (greatest - least) >= share


def _range_of_rewards(seen: Seen) -> tuple[float, float]:
    lowest = [value for _, value in seen.points("reward/min")]
    highest = [value for _, value in seen.points("reward/max")]
    return min(lowest, default=0.0), max(highest, default=0.0)


def cut(seen: Seen) -> Iterator[FoundSign]:
    """Answers that end at the length limit: nearly all, or some whose reward is lower, and which do not become fewer."""
    least, greatest = _range_of_rewards(seen)
    advice = (
        "raise sampling.max_tokens, or set advantage.overlong, so that a longer answer is not taken for a worse one"
    )
    for environment in seen.between("length/", "/cut"):
        name = f"length/{environment}/cut"
        shares = seen.newest(name, RAMP)
        share = median(shares[-NEW:]) if shares else 0.0
        if share >= MOST_CUT:
            reason = f"{share:.0%} of the answers are cut at their limit: their reward is that of a beginning"
            yield FoundSign(Sign.CUT, share, reason, advice, environment)
        elif share >= NOTABLE_CUT and share >= 0.75 * median(shares[:NEW]):
            of_cut, of_all = (
                seen.newest(f"length/{environment}/cut_reward", NEW),
                seen.newest(f"reward/{environment}/mean", NEW),
            )
            if of_cut and of_all:
                cut_reward = median(of_cut)
                others = (median(of_all) - share * cut_reward) / (1 - share)
                if others - cut_reward >= LOWER * (greatest - least) > 0:
                    reason = (
                        f"{share:.0%} of the answers are cut at their limit; their reward is {cut_reward:.3g}, "
                        f"the others' {others:.3g}"
                    )
                    yield FoundSign(Sign.CUT, share, reason, advice, environment)


def entropy(seen: Seen) -> Iterator[FoundSign]:
    """Entropy that has collapsed although the reward has not arrived, or that grows, against the run's first steps."""
    first, newest = seen.first("entropy"), seen.newest("entropy", NEW)
    if first is None or not newest or first <= 0:
        return
    now = median(newest)
    if now < COLLAPSE * first and not is_solved(seen):
        reason = f"entropy is {now:.3g} nats, {now / first:.0%} of that of the first steps: hardly anything is tried any more"
        advice = (
            "lower the learning rate, raise sampling.temperature or loss.clip_high, or set loss.entropy_coefficient"
        )
        yield FoundSign(Sign.ENTROPY, now / first, reason, advice)
    elif now > EXPLOSION * first and now > first + EXPLOSION_NATS:
        reason = f"entropy is {now:.3g} nats, {now / first:.1f} times that of the first steps: the policy falls apart"
        advice = "lower the learning rate, and go back to a checkpoint from before; see loss.entropy_coefficient if it is set"
        yield FoundSign(Sign.ENTROPY, now / first, reason, advice)


def stale_weights(seen: Seen) -> Iterator[FoundSign]:
    """Importance weights that leave little of the batch, and how much by the staleness of its samples."""
    newest = seen.newest("ess/mean", NEW)
    if not newest or (now := median(newest)) >= LEAST_EFFECTIVE:
        return
    last = seen.points("ess/mean", 1)[0][0]
    lags = {lag: seen.points(f"ess/{lag}", 1)[0] for lag in seen.between("ess/", "") if lag != "mean"}
    by_lag = [
        f"{value:.0%} at {lag}" for lag, (step, value) in sorted(lags.items(), key=lambda each: each[0]) if step == last
    ]
    of_lag = f" (by staleness in steps: {', '.join(by_lag)})" if by_lag else ""
    reason = f"the importance weights leave {now:.0%} of the tokens as effective sample{of_lag}"
    advice = (
        "where it falls with staleness, lower schedule.max_off_policy_steps or the learning rate; where it is low at 1, servers "
        "and trainer disagree: see mismatch_kl, precision, and the servers' weights"
    )
    yield FoundSign(Sign.STALE_WEIGHTS, now, reason, advice)


def masked(seen: Seen) -> Iterator[FoundSign]:
    """Tokens without a gradient, since their ratio is beyond the bounds."""
    newest = seen.newest("masked_share", NEW)
    if newest and (now := median(newest)) >= MOST_MASKED:
        reason = f"the loss leaves out {now:.0%} of the trained tokens: their ratio is beyond its bounds"
        advice = (
            "see the clip_ and ratio_ bounds of the loss; then lower the learning rate, updates_per_step or staleness"
        )
        yield FoundSign(Sign.MASKED, now, reason, advice)


def gradient_clipped(seen: Seen) -> Iterator[FoundSign]:
    """A gradient that is clipped at every step."""
    newest = seen.newest("grad_kept", CLIPPED_STEPS)
    if newest and 0 < max(newest) < 1 and (now := median(newest)) < LEAST_KEPT:
        reason = f"the gradient was clipped at each of the newest {CLIPPED_STEPS} steps, to {now:.0%} of its norm"
        advice = "raise training.max_grad_norm above the usual grad_norm, so that it bounds odd batches alone, or scale rewards"
        yield FoundSign(Sign.GRADIENT_CLIPPED, now, reason, advice)


def held_out(seen: Seen) -> Iterator[FoundSign]:
    """A reward that rises while a score of an evaluation has fallen below the interval of its best, once each."""
    told = set[str]()
    for name in sorted(each for each in seen.names if each.startswith("evaluation/") and each.endswith("/high")):
        score = name.removesuffix("/high")
        evaluation = score.removeprefix("evaluation").removeprefix("/").partition("/")[0]
        if not evaluation or evaluation in told:
            continue
        highs, lows, scores = (dict(seen.points(each)) for each in (name, f"{score}/low", score))
        steps = sorted(highs.keys() & lows.keys() & scores.keys())
        if len(steps) < 2:
            continue
        best, last = max(steps[:-1], key=lambda step: scores[step]), steps[-1]
        rewards = seen.points("reward/mean")
        before = [value for step, value in rewards if step <= best][-NEW:]
        after = [value for step, value in rewards if step <= last][-NEW:]
        has_fallen = highs[last] < lows[best] and scores[best] - scores[last] >= NOTABLE_FALL * abs(scores[best])
        if before and after and has_fallen and median(after) > median(before):
            told.add(evaluation)
            reason = (
                f"{score.removeprefix('evaluation/')} fell from {scores[best]:.3g} to {scores[last]:.3g}, below its interval, "
                f"while the reward rose from {median(before):.3g} to {median(after):.3g}"
            )
            advice = f"look at answers with a high reward for what the reward pays and the task does not; go back to step {best}"
            yield FoundSign(Sign.HELD_OUT, scores[last] - scores[best], reason, advice, evaluation)


def trade_off(seen: Seen) -> Iterator[FoundSign]:
    """One environment's reward that falls while another's rises."""
    names = {environment: f"reward/{environment}/mean" for environment in seen.between("reward/", "/mean")}
    for falling, rising, fall, rise in _opposed(seen, names):
        reason = (
            f"its reward fell by {-fall:.3g} within {OPPOSED_STEPS} steps, while that of {rising} rose by {rise:.3g}"
        )
        advice = (
            f"raise its ratio, lower the learning rate, or scale the reward of {rising}, which now decides the updates"
        )
        yield FoundSign(Sign.TRADE_OFF, fall, reason, advice, falling)


def parts(seen: Seen) -> Iterator[FoundSign]:
    """Two parts that raise a reward and move against one another: the policy gives up one for the other."""
    for environment in seen.paid_parts:
        for falling, rising, fall, rise in _opposed(seen, seen.names_of_parts(environment)):
            reason = f"part {falling!r} fell by {-fall:.3g} within {OPPOSED_STEPS} steps, while {rising!r} rose by {rise:.3g}"
            advice = f"weigh {falling!r} more, or make it a condition (`required`), so that {rising!r} cannot be had without it"
            yield FoundSign(Sign.PARTS, fall, reason, advice, f"{environment}: {falling}")


def _opposed(seen: Seen, names: dict[str, str]) -> Iterator[tuple[str, str, float, float]]:
    """Yields each name whose metric surely falls beside one that surely rises, with that and the moves of both."""
    moves = {}
    for each, name in names.items():
        values, every = seen.newest(name, OPPOSED_STEPS), [value for _, value in seen.points(name)]
        moved = trend(values) if values else FittedLine(0.0, 0.0)
        if abs(moved.certainty) >= SURE and abs(moved.move) >= NOTABLE_MOVE * max(map(abs, every)):
            moves[each] = moved.move
    rising = max(moves, key=lambda each: moves[each], default="")
    for each, move in moves.items():
        if move < 0 < moves[rising]:
            yield each, rising, move, moves[rising]


def plateau(seen: Seen) -> Iterator[FoundSign]:
    """A reward that surely has not risen for long, and is far from the greatest."""
    least, greatest = _range_of_rewards(seen)
    for steps in PLATEAU_STEPS:
        values = seen.newest("reward/mean", steps)
        if not values or is_solved(seen, 2 * NEW, NEARLY):
            return
        moved = trend(values)
        if moved.move + CERTAIN * moved.error < LITTLE * (greatest - least):
            stands = median(values[-2 * NEW :])
            reason = f"the reward did not rise in {steps} steps: it stands at {stands:.3g}, moved by {moved.move:.2g}"
            advice = (
                "see groups/no_difference and entropy first; then another rate, larger groups, or examples within reach"
            )
            yield FoundSign(Sign.PLATEAU, moved.move, reason, advice)
            return


def drift(seen: Seen) -> Iterator[FoundSign]:
    """A policy that is far from its reference."""
    newest = seen.newest("reference_kl", NEW)
    if newest and (now := median(newest)) >= MOST_DRIFT:
        reason = f"the policy is {now:.3g} nats a token from its reference"
        advice = "raise loss.kl_coefficient or reference.reward_coefficient, or lower the learning rate"
        yield FoundSign(Sign.DRIFT, now, reason, advice)


def constant_answer(seen: Seen) -> Iterator[FoundSign]:
    """Answers that came to be the same whatever is asked."""
    for environment in seen.between("answers/", "/shared"):
        name = f"answers/{environment}/shared"
        first, newest = seen.first(name), seen.newest(name, NEW)
        if first is not None and newest and (now := median(newest)) >= MOST_ALIKE and first <= MOST_ALIKE / 2:
            reason = f"{now:.0%} of the answers are such as another example got, too; in the first steps {first:.0%}"
            advice = (
                "look at the best answers (`counterpoint show --best`): a reward that one answer wins asks for no task"
            )
            yield FoundSign(Sign.CONSTANT_ANSWER, now, reason, advice, environment)


def repeated(seen: Seen) -> Iterator[FoundSign]:
    """Answers that repeat their siblings', so that a group has little to compare, although the reward has not arrived."""
    for environment in seen.between("answers/", "/repeated"):
        newest = seen.newest(f"answers/{environment}/repeated", 2 * NEW)
        if newest and (now := median(newest)) >= MOST_REPEATED and not is_solved(seen):
            reason = f"{now:.0%} of the answers repeat another one of their group"
            advice = "raise sampling.temperature or loss.entropy_coefficient, or lower the learning rate"
            yield FoundSign(Sign.REPEATED, now, reason, advice, environment)


def few_differences(seen: Seen) -> Iterator[FoundSign]:
    """Groups that teach nothing, step after step, although the reward has not arrived."""
    newest = seen.newest("groups/no_difference", 2 * NEW)
    if newest and (now := median(newest)) >= MOST_EQUAL and not is_solved(seen):
        played = 1 / max(1e-3, 1 - now)
        reason = f"{now:.0%} of the groups show no difference: {played:.0f} groups are played for one that teaches"
        advice = "take easier examples or a curriculum, a larger schedule.group_size, or a reward with more steps"
        yield FoundSign(Sign.FEW_DIFFERENCES, now, reason, advice)


RULES: tuple[Callable[[Seen], Iterator[FoundSign]], ...] = (
    cut, entropy, stale_weights, masked, gradient_clipped, held_out, trade_off, plateau, drift, parts, constant_answer,
    repeated, few_differences,
)  # fmt: skip


def found_in(seen: Seen) -> list[FoundSign]:
    """Returns what the rules find in the metrics so far."""
    return [found for rule in RULES for found in rule(seen)]
