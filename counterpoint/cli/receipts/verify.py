"""`counterpoint verify`: checks a run's directory against its receipts; its exit code is the result.

With `--step N` it trains a recorded step again, and compares what comes of it with what was kept of the step.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from counterpoint.cli.arguments.job import add_job, job_of
from counterpoint.job.reading.rollouts.rollout_records import find_run
from counterpoint.transport.errors import UserError
from counterpoint.verify.files import Directory, Unreadable
from counterpoint.verify.formats import ProbeFile, Receipt, Trained, read
from counterpoint.verify.report import DAMAGED, SOUND
from counterpoint.verify.run import verify

WEIGHTS = "digest of the weights, of receipts and the trainer's notes"


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` if there is no such run, or its step cannot be trained again."""
    given = _parser().parse_args(arguments)
    job, run_id = run_of(given)
    if given.step is not None:
        return _verify_step(given, job, run_id)
    report = verify(job / f"run_{run_id}", given.head)
    print(json.dumps(report.values()) if given.json else report.text())
    return report.code


def run_of(given: argparse.Namespace) -> tuple[Path, str]:
    """Returns the job's directory and the run's id, by the directory of either. Raises `UserError`."""
    job = job_of(given)
    if job.name.startswith("run_") and (job / "control").is_dir():
        return job.absolute().parent, job.name.removeprefix("run_")
    return job, find_run(job, given.run)


def _verify_step(given: argparse.Namespace, job: Path, run_id: str) -> int:
    """Runs the command; returns its exit code. Raises `UserError` for a step that cannot be trained again."""
    from counterpoint.cli.receipts.again import again  # which takes longer to import than a check does

    with again(given, job, run_id, "trained") as (config, directory):
        from counterpoint.trainer.again import kept, verified

        step = kept.find(job, run_id, given.step, config.transport.max_batch_bytes)
        batches, digests = _recorded(job, run_id, given.step)
        result, own = verified.train_again(config, step, directory)
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


def _recorded(job: Path, run_id: str, version: int) -> tuple[dict[int, str], set[str]]:
    """Returns the digest of each batch by its receipt, and those of a version's weights by receipts and the newest note of it.

    Receipts name the weights that were played with, and so never those of the newest step.
    """
    batches: dict[int, str] = {}
    weights: set[str] = set()
    run, trainer = Directory(job / f"run_{run_id}"), Directory(job / "trainer" / run_id)
    try:
        for line in run.lines("receipts.jsonl") if run.has("receipts.jsonl") else ():
            receipt = read(line, Receipt)
            batches[receipt.step] = receipt.batch
            weights |= {receipt.weights[version]} if version in receipt.weights else set()
        notes = (read(line, Trained) for line in trainer.lines("trained.jsonl")) if trainer.has("trained.jsonl") else ()
        weights |= {*[each.weights for each in notes if each.step == version][-1:]}
    except (Unreadable, FileNotFoundError) as error:
        raise UserError(
            f"the receipts of run {run_id}, or the trainer's notes of it, cannot be read: {error}; `counterpoint verify` names "
            "the damage"
        ) from None
    return batches, weights


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint verify",
        description="Checks a run against its receipts: nothing is missing, doubled, reordered or altered, and each example was "
        f"trained as often as the order of data says. With --step it trains that step again, and compares. Exit code {SOUND}: "
        "sound; 1: damage; 3: no receipts; 4: the run is being written; 5: the chain of receipts is broken; 6: what it takes to "
        "train the step again was not kept.",
        allow_abbrev=False,
    )
    add_job(parser, positional=True)
    parser.add_argument("--run", help="the run, if the job has several")
    parser.add_argument(
        "--head",
        type=_head,
        metavar="HASH",
        help="the hash that was noted of the newest receipt; it pins all before it",
    )
    parser.add_argument("--step", type=int, metavar="N", help="train step N again, and compare")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    return parser


def _head(text: str) -> str:
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected 64 hexadecimal digits, the `head` of an earlier report")
    return text
