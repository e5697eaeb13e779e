"""Compares receipts with what the trainer, another process, has left: its notes of steps, its checkpoints and broadcasts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from counterpoint.verify.files import Directory
from counterpoint.verify.formats import ProbeFile, Trained, TrainerState, read
from counterpoint.verify.report import BROKEN_CHAIN, Verdict


def checkpoints_of(job: Path, report: Verdict) -> Iterator[tuple[int, str, Trained]]:
    """Yields each checkpoint that the trainer has of the run: its step, its file, and what that says to have trained."""
    trainer = Directory(job / "trainer" / report.run)
    for step in trainer.steps("checkpoints"):
        name = f"checkpoints/step_{step}/state.json"
        with report.reading(f"trainer/{report.run}/{name}", step):
            yield step, f"trainer/{report.run}/{name}", read(b"".join(trainer.lines(name)), TrainerState).progress


def check_trained(
    job: Path, heads: set[str], batches: dict[int, str], weights: dict[int, list[str]], report: Verdict
) -> None:
    """Compares the hashes of receipts, and the batches and weights in them, with what the trainer says of its steps."""

    def compare_batch(file: str, step: int, made: Trained) -> None:
        if made.batch and made.batch != (expected := batches.get(made.step, made.batch)):
            what = f"it has trained another batch, {made.batch}, than that of the receipt, {expected}"
            report.damage(file, what, step)

    for step, file, made in checkpoints_of(job, report):
        report.checked["batches that the trainer's checkpoints name"] += made.step in batches and bool(made.batch)
        compare_batch(file, step, made)
    file, before = f"trainer/{report.run}/trained.jsonl", -1
    noted: dict[int, set[str]] = {}
    again: set[int] = set()
    lost: list[Trained] = []
    with report.reading(file, may_miss=True):
        for line in Directory(job).lines(file):
            if not line.endswith(b"\n"):
                break  # by a kill
            made = read(line, Trained)
            compare_batch(file, made.step, made)
            lost += [made] if made.head and made.head not in heads else []
            # After a kill, steps are trained again, maybe to other weights, and what was noted of them may be lost.
            again |= {made.step} if again or made.step <= before else set()
            before = made.step
            noted.setdefault(made.step, set()).add(made.weights)
    for made in lost[:1]:
        what = f"the newest receipt had the hash {made.head} then, and none has it now: the chain was written anew"
        report.damage(file, what, made.step, code=BROKEN_CHAIN)
    for version in sorted(weights.keys() & noted.keys()):
        is_noted = {*weights[version]} <= noted[version]
        why = "versions of weights that were trained again, and published with another digest"
        report.count(is_noted or version not in again, "weights that the trainer noted", why)
        if not is_noted and version not in again:
            report.damage(file, "it has noted other weights of this version than a receipt has", version)
    for step in batches:
        report.count(step in noted, "steps that the trainer noted", "steps of which the trainer noted nothing")


def check_weights(run: Directory, weights: dict[int, list[str]], report: Verdict) -> None:
    """Compares the broadcasts that are still there with the digests in receipts, and counts versions that had several."""
    for version in run.steps("broadcast"):
        name, known = f"broadcast/step_{version}/probe.json", weights.get(version)
        with report.reading(name, version, may_miss=True):
            if known and read(next(run.lines(name), b""), ProbeFile).digest != known[-1]:
                report.damage(name, "its digests are not those that a receipt has of this version", version)
    if twice := sum(len({*digests}) > 1 for digests in weights.values()):
        report.unchecked["versions of weights that were published again with another digest"] += twice
