"""Checks what of a step's records was trained: ages of turns, filters, and, while it is there, the batch itself."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import numpy.typing as npt

from counterpoint.verify.advantages import OVER_STEP, Values, base_advantages
from counterpoint.verify.arrays import Arrays, read_batch
from counterpoint.verify.files import Directory
from counterpoint.verify.formats import Filter, Played
from counterpoint.verify.records import DIGITS, Step


def check_turns(step: Step, weights: dict[int, list[str]], loads: dict[str, int]) -> None:
    """Checks each turn: staleness allowed its version, its server's load has no other version, its tokens have its hash.

    `loads` has the version of each load that is known.
    """
    now, count_as = step.receipt.step, step.report.count
    oldest = max(0, now - max(rule.max_off_policy_steps for rule in step.rules))
    for each in step.recorded:
        for number, turn in enumerate(each.turns):
            version, (process, _, count) = turn.policy_version, turn.load.partition(":")
            is_whole = each.tokens is not None and turn.completion_hash is not None
            count_as(bool(process), "loads of turns", "turns whose server does not say by which load of weights")
            count_as(version in weights, "turns of known weights", "turns of weights whose digest no receipt has")
            count_as(is_whole, "hashes of turns", "turns without a hash, or whose tokens are not recorded whole")
            if each.error is None and not oldest <= version < now:
                what = f"is of version {version}; step {now} may train {oldest} to {now - 1}"
            elif process and loads.setdefault(f"{process}:{count.partition('-')[0]}", version) != version:
                what = f"is of version {version}, and its server's load {turn.load:.60} of another"
            elif is_whole and not _is_hash(turn.completion_hash, each.tokens[number]["token_ids"]):
                what = "has other tokens than its hash says"
            else:
                continue
            step.damage(f"turn {number} {what}", each.rollout_id)


def _is_hash(said: str | None, ids: npt.NDArray[np.int32]) -> bool:
    """Whether a turn's hash is that of these ids. One without a hash has that of any."""
    return said is None or sha256(ids.tobytes()).hexdigest()[:DIGITS] == said


def check_filters(step: Step) -> None:
    """Compares which rollouts were filtered with the filters that were in force."""
    scored = [each for each in step.recorded if each.advantage_kind]
    over_step = [each for each in scored if each.advantage_kind in OVER_STEP]
    rules = [(base_advantages(over_step, rule.advantage), rule.filters) for rule in step.rules]
    for each in scored:
        said, expected = each.filtered_by, [_filter_of(each, base[each.rollout_id], filters) for base, filters in rules]
        if said in expected or "?" in expected:
            step.report.count(said in expected, "filters", "filters of rollouts whose tokens are not recorded whole")
        else:
            step.damage(f"it is filtered by {said}; the rules give {expected[0]}", each.rollout_id)


def _filter_of(each: Played, base: dict[str, Values], filters: list[Filter]) -> str | None:
    """Returns the first enforcing filter that catches a rollout, None if none does, and `?` if it cannot be told."""
    if not any(turn.trained_tokens > 0 for turn in each.turns):
        return "untrained"
    for config in filters:
        if config.mode != "enforce":
            continue
        if config.kind == "zero_advantage":
            of_turns = [turn.advantage for turn in each.turns if turn.advantage is not None and turn.trained_tokens > 0]
            caught = bool(np.abs(of_turns or [of.item() for of in base.values()] or [each.advantage]).max() <= 1e-9)
        elif each.tokens is None or (config.kind == "gibberish" and config.log_probability_below is None):
            return "?"
        elif config.kind == "gibberish":
            every = np.concatenate([turn["log_probabilities"][turn["untrained"] == 0] for turn in each.tokens])
            caught = bool((every < config.log_probability_below).sum() > config.share_above * len(every))
        else:
            caught = any(_repeats(config, turn["token_ids"][turn["untrained"] == 0].tolist()) for turn in each.tokens)
        if caught:
            return config.kind
    return None


def _repeats(config: Filter, ids: list[int]) -> bool:
    """Whether, in a window, more than a share of a turn's n-grams begin in the half window before them, too."""
    count = len(ids) - config.ngram + 1
    if count < max(1, config.minimum):
        return False
    window = min(max(count * 2 // 3, 1), config.window)
    latest: dict[tuple[int, ...], int] = {}
    repeated = np.zeros(count + 1, np.int64)
    for place in range(count):
        gram = tuple(ids[place : place + config.ngram])
        repeated[place + 1] = place - latest.get(gram, -count) <= max(1, window // 2)
        latest[gram] = place
    so_far = np.cumsum(repeated)
    return bool((so_far[window:] - so_far[:-window]).max() > config.share_above * window)


def check_batch(run: Directory, step: Step) -> None:
    """Compares the batch, if it is still there, with the receipt and the records."""
    directory = f"rollouts/step_{step.receipt.step}"
    file = "kept_batch.bin" if run.has(f"{directory}/kept_batch.bin") else "batch.bin"
    name = f"{directory}/{file}"
    step.report.count(run.has(name), "batches", "batches that were trained long ago and removed")
    with step.report.reading(name, step.receipt.step, may_miss=True):
        digest, number, samples = read_batch(run, name)
        if (digest, number) != (step.receipt.batch, step.receipt.step):
            step.damage(f"its digest is {digest} of step {number}; the receipt has {step.receipt.batch}", file=file)
        lines = {each.rollout_id: each for each in step.recorded if each.is_trained}
        for rollout in samples.keys() ^ lines.keys():
            step.damage("it is trained by batch or record, and not by the other", rollout, file)
        for rollout in samples.keys() & lines.keys():
            if fault := _difference(samples[rollout], lines[rollout]):
                step.damage(fault, rollout, file)


def _difference(samples: list[tuple[int, Arrays]], each: Played) -> str | None:
    """Returns how the samples of a rollout differ from its record, for a person."""
    parts = [part for _, part in samples]
    masks = [part["loss_mask"] != 0 for part in parts]
    of_turns = [turn.advantage for turn in each.turns if turn.advantage is not None]
    values = np.array([each.advantage, *each.player_advantages.values(), *of_turns], np.float32)
    if not all(np.isin(part["advantages"][mask], values).all() for part, mask in zip(parts, masks, strict=True)):
        return "its advantages are not those of its record"
    if not {version for version, _ in samples} <= {turn.policy_version for turn in each.turns}:
        return "its version is that of none of its turns"
    trained = [turn for turn in each.turns if turn.trained_tokens > 0]
    if sum(map(np.count_nonzero, masks)) != sum(turn.trained_tokens for turn in trained):
        return "it trains another number of tokens than its turns have"
    for number, turn in enumerate(trained, 1):
        asked, end = turn.prompt_tokens, turn.prompt_tokens + turn.completion_tokens
        if not any(
            _is_hash(turn.completion_hash, part["token_ids"][asked:end])
            and _is_hash(turn.prompt_hash, part["token_ids"][:asked])
            for part in parts
        ):
            return f"no sample of it has the tokens of its trained turn {number}, by their hashes"
    for column in ("token_ids", "log_probabilities") if each.tokens and len(parts) == 1 else ():
        recorded = np.concatenate([turn[column][turn["untrained"] == 0] for turn in each.tokens])
        if not np.array_equal(parts[0][column][masks[0]], recorded):
            return f"its {column} are not those of tokens.bin"
    return None
