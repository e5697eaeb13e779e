"""Checks what of a step's records was trained: ages of turns, filters, and, while it is there, the batch itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from counterpoint.verify.advantages import OVER_STEP, base_advantages
from counterpoint.verify.arrays import Arrays, TrainedBatch, completions, read_batch
from counterpoint.verify.files import Directory, Unreadable
from counterpoint.verify.formats import Filter, Played, ProbeFile, Receipt, Recorded, Rules, TrainerState, read
from counterpoint.verify.report import Verdict


def check_ages(
    step: int,
    recorded: Sequence[Played],
    rules: Sequence[Rules],
    weights: dict[str, list[str]],
    report: Verdict,
) -> None:
    """Checks that each turn's weights are a version that staleness allowed, and counts those with a known digest."""
    limit = max(rule.max_off_policy_steps for rule in rules)
    for each in recorded:
        for number, turn in enumerate(each.turns if each.error is None else ()):
            version = turn.policy_version
            if not 0 <= version < step or step - version > limit:
                what = (
                    f"turn {number} is of version {version}; step {step} may train {max(0, step - limit)} to {step - 1}"
                )
                report.damage(f"rollouts/step_{step}/rollouts.jsonl", what, step, each.rollout_id)
            elif str(version) in weights:
                report.checked["turns of weights with a digest"] += 1
            else:
                report.unchecked["turns of weights whose digest no receipt has"] += 1


def check_loads(step: int, recorded: Sequence[Played], loads: dict[str, int], report: Verdict) -> None:
    """Checks that each load of weights at a server, by the server's own count, has one version. `loads` has those known."""
    for each in recorded:
        for number, turn in enumerate(each.turns):
            process, _, count = turn.load.partition(":")
            if not process:
                report.unchecked["turns whose server does not say by which load of weights"] += 1
            elif loads.setdefault(f"{process}:{count.partition('-')[0]}", turn.policy_version) != turn.policy_version:
                what = f"turn {number} is of version {turn.policy_version}, and its server's load {turn.load:.60} of another"
                report.damage(f"rollouts/step_{step}/rollouts.jsonl", what, step, each.rollout_id)


def trained_batches(trainer: Directory, report: Verdict) -> dict[int, str]:
    """Returns by step the digest of the batch that the trainer's checkpoints of the run say to have trained."""
    found: dict[int, str] = {}
    for step in trainer.steps("checkpoints"):
        name = f"checkpoints/step_{step}/state.json"
        try:
            progress = read(b"".join(trainer.lines(name)), TrainerState).progress
        except (Unreadable, FileNotFoundError) as error:
            report.damage(f"trainer/{report.run}/{name}", str(error), step)
        else:
            found |= {progress.step: progress.batch} if progress.batch else {}
    return found


def check_weights(run: Directory, weights: dict[str, list[str]], report: Verdict) -> None:
    """Compares the broadcasts that are still there with the digests in receipts, and counts versions that had several."""
    for version in run.steps("broadcast"):
        name, known = f"broadcast/step_{version}/probe.json", weights.get(str(version))
        try:
            if known and read(next(run.lines(name), b""), ProbeFile).digest != known[-1]:
                report.damage(name, "its digests are not those that a receipt has of this version", version)
        except FileNotFoundError:
            continue
        except Unreadable as error:
            report.damage(name, str(error), version)
    if twice := sum(len({*digests}) > 1 for digests in weights.values()):
        report.unchecked["versions of weights that were published again with another digest"] += twice


def check_filters(step: int, recorded: Sequence[Recorded], rules: Sequence[Rules], report: Verdict) -> None:
    """Compares which rollouts were filtered with the filters that were in force."""
    scored = [each for each in recorded if each.line.advantage_kind]
    over_step = [each.line for each in scored if each.line.advantage_kind in OVER_STEP]
    bases = [base_advantages(over_step, rule.advantage) for rule in rules]
    for each in scored:
        turns, said, name = each.frame and completions(each.frame), each.line.filtered_by, each.line.rollout_id
        expected = [
            _filter_of(each.line, turns or None, base.get(name, {"": each.line.advantage}), rule.filters)
            for base, rule in zip(bases, rules, strict=True)
        ]
        if said in expected:
            report.checked["filters"] += 1
        elif "?" in expected:
            report.unchecked["filters of rollouts whose tokens are not recorded whole"] += 1
        else:
            what = f"it is filtered by {said}; the rules give {expected[0]}"
            report.damage(f"rollouts/step_{step}/rollouts.jsonl", what, step, name)


def _filter_of(
    line: Played, turns: list[Arrays] | None, base: dict[str, float], filters: Sequence[Filter]
) -> str | None:
    """Returns the first enforcing filter that catches a rollout, None if none does, and `?` if it cannot be told."""
    if not any(turn.completion_tokens > turn.untrained_tokens for turn in line.turns):
        return "untrained"
    for config in filters:
        if config.mode != "enforce":
            continue
        if config.kind == "zero_advantage":
            caught = all(abs(value) <= 1e-9 for value in base.values())
        elif turns is None or (config.kind == "gibberish" and config.log_probability_below is None):
            return "?"
        elif config.kind == "gibberish":
            every = np.concatenate([turn["log_probabilities"][turn["untrained"] == 0] for turn in turns])
            caught = bool((every < config.log_probability_below).sum() > config.share_above * len(every))
        else:
            caught = any(_repeats(config, turn["token_ids"][turn["untrained"] == 0].tolist()) for turn in turns)
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


def check_batch(run: Directory, receipt: Receipt, recorded: Sequence[Recorded], report: Verdict) -> None:
    """Compares `batch.bin`, if it is still there, with the receipt and the records."""
    step, name = receipt.step, f"rollouts/step_{receipt.step}/batch.bin"
    if not run.has(name):
        report.unchecked["batches that were trained long ago and removed"] += 1
        return
    try:
        batch = read_batch(run, name)
    except (Unreadable, FileNotFoundError) as error:
        report.damage(name, str(error), step)
        return
    if (batch.digest, batch.step) != (receipt.batch, step):
        report.damage(name, f"its digest is {batch.digest} of step {batch.step}; the receipt has {receipt.batch}", step)
    lines = {each.line.rollout_id: each for each in recorded if each.line.is_trained}
    samples: dict[str, list[int]] = {}
    for index, sample in enumerate(batch.samples):
        samples.setdefault(sample[0], []).append(index)
    for rollout in samples.keys() ^ lines.keys():
        report.damage(name, "it is trained by batch or record, and not by the other", step, rollout)
    for rollout, indices in samples.items():
        if (each := lines.get(rollout)) is not None and (fault := _difference(batch, indices, each)):
            report.damage(name, fault, step, rollout)
    report.checked["batches"] += 1


def _difference(batch: TrainedBatch, indices: Sequence[int], each: Recorded) -> str | None:
    """Returns how the samples of a rollout differ from its record, for a person."""
    line = each.line
    parts = [batch.sample(index) for index in indices]
    masks = [part["loss_mask"] != 0 for part in parts]
    said = [
        line.advantage,
        *line.player_advantages.values(),
        *(turn.advantage for turn in line.turns if turn.advantage is not None),
    ]
    values = np.array(said, np.float32)
    if not all(np.isin(part["advantages"][mask], values).all() for part, mask in zip(parts, masks, strict=True)):
        return "its advantages are not those of its record"
    versions = {turn.policy_version for turn in line.turns}
    if not {batch.samples[index][2] for index in indices} <= versions:
        return "its version is that of none of its turns"
    if sum(map(np.count_nonzero, masks)) != sum(turn.completion_tokens - turn.untrained_tokens for turn in line.turns):
        return "it trains another number of tokens than its turns have"
    turns = completions(each.frame) if each.frame is not None and len(parts) == 1 else None
    for column in ("token_ids", "log_probabilities") if turns else ():
        recorded = np.concatenate([turn[column][turn["untrained"] == 0] for turn in turns or ()])
        if not np.array_equal(parts[0][column][masks[0]], recorded):
            return f"its {column} are not those of tokens.bin"
    return None
