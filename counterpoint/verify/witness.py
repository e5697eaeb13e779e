"""Compares receipts with what the trainer, another process, has left: its notes of steps, its checkpoints and broadcasts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from counterpoint.verify.files import Directory
from counterpoint.verify.formats import ProbeFile, Trained, TrainerState, read
from counterpoint.verify.report import BROKEN_CHAIN, Verdict


def checkpoints_of(job: Path, report: Verdict) -> Iterator[tuple[str, int, Trained]]:
    """Yields each checkpoint that the trainer has of the run: its file, its step, and what that says to have trained."""
    trainer = Directory(job / "trainer" / report.run)
    for step in trainer.steps("checkpoints"):
        name = f"checkpoints/step_{step}/state.json"
        with report.reading(file := f"trainer/{report.run}/{name}", step):
            yield file, step, read(trainer.read(name), TrainerState).progress


def check_trained(job: Path, batches: dict[int, str], weights: dict[int, list[str]], report: Verdict) -> None:
    """Compares the hashes of receipts, and the batches and weights in them, with what the trainer says of its steps."""
    notes: list[Trained] = []
    with report.reading(file := f"trainer/{report.run}/trained.jsonl", may_miss=True):
        notes += (read(line, Trained) for line in Directory(job / "trainer" / report.run).lines("trained.jsonl"))
    for where, step, made in (*((file, each.step, each) for each in notes), *checkpoints_of(job, report)):
        if made.batch and (expected := batches.get(made.step)) is not None:
            report.checked["batches that the trainer names"] += 1
            if made.batch != expected:
                what = f"it has trained another batch, {made.batch}, than that of the receipt, {expected}"
                report.damage(where, what, step)
    for each in [each for each in notes if each.head and each.head not in report.heads][:1]:
        what = f"the newest receipt had the hash {each.head} then, and none has it now: receipts are missing or written anew"
        report.damage(file, what, each.step, code=BROKEN_CHAIN)
    noted = {(each.step, each.weights) for each in notes}
    steps = {each.step for each in notes}
    # After a kill, steps are trained again, maybe to other weights, and what was noted of them may be lost.
    again = [index for index, (former, each) in enumerate(pairwise(notes), 1) if each.step <= former.step]
    later = {each.step for each in notes[min(again, default=len(notes)) :]}
    for version in sorted(weights.keys() & steps):
        is_noted = all((version, digest) in noted for digest in weights[version])
        if is_noted or version in later:
            report.count(is_noted, "weights that the trainer noted", "weights of versions that were trained again")
        else:
            report.damage(file, "it has noted other weights of this version than a receipt has", version)
    for step in batches:
        report.count(step in steps, "steps that the trainer noted", "steps of which the trainer noted nothing")


def check_weights(run: Directory, weights: dict[int, list[str]], report: Verdict) -> None:
    """Compares the broadcasts that are still there with the digests in receipts, and counts versions that had several."""
    for version in run.steps("broadcast"):
        name, known = f"broadcast/step_{version}/probe.json", weights.get(version)
        with report.reading(name, version, may_miss=True):
            if known and read(run.read(name), ProbeFile).digest != known[-1]:
                report.damage(name, "its digests are not those that a receipt has of this version", version)
    if twice := sum(len({*digests}) > 1 for digests in weights.values()):
        report.unchecked["versions of weights that were published again with another digest"] += twice
