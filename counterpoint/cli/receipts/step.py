"""`counterpoint verify --step N`: trains a recorded step again, and compares what comes of it with what was kept of the step."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from counterpoint.cli.receipts.again import run_of, trainer_of, workplace
from counterpoint.transport.errors import UserError
from counterpoint.transport.process.imports import trainer_imports
from counterpoint.verify.files import Directory, Unreadable
from counterpoint.verify.formats import ProbeFile, Receipt, read
from counterpoint.verify.report import DAMAGED, SOUND

WEIGHTS = "digest of the weights, of receipts and broadcast"


def verify_step(given: argparse.Namespace) -> int:
    """Runs the command; returns its exit code. Raises `UserError` for a step that cannot be trained again."""
    job, run_id = run_of(given)
    config = trainer_of(job)
    with trainer_imports():
        from counterpoint.trainer.again import kept, verified
    step = kept.find(job, run_id, given.step, config.transport.max_batch_bytes)
    batches, digests = _recorded(job / f"run_{run_id}", given.step)
    with workplace(given.json) as directory:
        try:
            result, own = verified.train_again(config, step, directory)
        except ValueError as error:
            raise UserError(f"step {given.step} of run {run_id} cannot be trained again: {error}") from None
    if known := [batches[each] == digest for each, digest in result.batches.items() if each in batches]:
        result.compared[verified.BATCHES] = all(known) and result.compared.get(verified.BATCHES, True)
    if digests:
        result.compared[WEIGHTS] = ProbeFile(own).digest in digests
    if not result.compared:
        raise kept.NotKept(
            f"nothing of step {given.step} of run {run_id} was kept to compare with: neither metrics nor weights"
        )
    print(json.dumps(result.values()) if given.json else result.text())
    return SOUND if result.is_within else DAMAGED


def _recorded(run_dir: Path, version: int) -> tuple[dict[int, str], set[str]]:
    """Returns the digest of each batch by its receipt, and those of the weights of a version by receipts and its broadcast."""
    batches: dict[int, str] = {}
    weights: set[str] = set()
    run = Directory(run_dir)
    try:
        for line in run.lines("receipts.jsonl") if run.has("receipts.jsonl") else ():
            receipt = read(line, Receipt)
            batches[receipt.step] = receipt.batch
            weights |= {receipt.weights[str(version)]} if str(version) in receipt.weights else set()
        if run.has(name := f"broadcast/step_{version}/probe.json"):
            weights.add(read(next(run.lines(name), b""), ProbeFile).digest)
    except (Unreadable, FileNotFoundError) as error:
        raise UserError(
            f"the receipts of {run_dir} cannot be read: {error}; `counterpoint verify` names the damage"
        ) from None
    return batches, weights
