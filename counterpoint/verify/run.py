"""Verifies a run: its chain of receipts, and with each receipt what the directory has of that step."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from counterpoint.verify.advantages import check_advantages
from counterpoint.verify.chain import FILE, receipts
from counterpoint.verify.files import Directory, Unreadable
from counterpoint.verify.formats import ItemReceipt, Receipt, Rules, Trained, read
from counterpoint.verify.groups import Groups, check_shipped
from counterpoint.verify.items import verify_items
from counterpoint.verify.records import Step, read_records
from counterpoint.verify.report import BEING_WRITTEN, NO_RECEIPTS, Verdict
from counterpoint.verify.training import check_batch, check_filters, check_turns
from counterpoint.verify.witness import check_trained, check_weights

MOST_RULES = 64
"""The rules of a run that a rollout may have been finalized by: the newest ones, since a rollout waits a few steps at most."""


def verify(path: Path, head: str | None = None) -> Verdict:
    """Checks the run in the directory `path` (`run_<id>`). `head` is the hash of a receipt that the chain must have.

    Raises `OSError` if the directory cannot be read.
    """
    run = Directory(path)
    report = Verdict(path.name.removeprefix("run_"))
    if run.is_being_written():
        report.damage(".", "an orchestrator writes this run now; verify it once that has ended", code=BEING_WRITTEN)
        return report
    with suppress(FileNotFoundError, Unreadable):
        if read(next(run.lines(FILE), b""), ItemReceipt):  # else it is the receipt of a step, or none
            verify_items(path, report, head)
            return report
    groups = Groups()
    rules: list[Rules] = []
    weights: dict[int, list[str]] = {}
    loads: dict[str, int] = {}
    batches: dict[int, str] = {}
    heads: set[str] = set()
    code: dict[str, str] | None = None
    # The records of one more step may be there: they are written before its commit.
    newest = max([*run.steps("checkpoints"), *(each - 1 for each in run.steps("rollouts"))], default=0)
    with report.reading("branch.json", may_miss=True):  # a branch has receipts of its own steps alone
        newest *= newest > read(next(run.lines("branch.json"), b""), Trained).step
    for receipt in receipts(run, report, head, Receipt, newest):
        if receipt.rules not in rules[:1]:
            rules = [receipt.rules, *rules][:MOST_RULES]
        batches[receipt.step] = receipt.batch
        heads.add(report.head)
        if code not in (None, receipt.code):
            report.unchecked["what a change of an environment's code changed (steps)"] += 1
        code = receipt.code
        for version, digest in receipt.weights.items():
            weights.setdefault(version, []).append(digest)
        shipped = groups.take(receipt, report)
        recorded = read_records(run, receipt, report)
        if recorded is None:
            continue
        step = Step(receipt, [each for each in recorded if each.dropped is None], rules, report)
        try:
            check_shipped(step, shipped)
            check_turns(step, weights, loads)
            check_advantages(step)
            check_filters(step)
            check_batch(run, step)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # values of any size and kind
            step.damage(f"nothing can be computed with it: {error}")
    check_weights(run, weights, report)
    check_trained(path.parent, heads, batches, weights, report)
    if not report.steps and not report.findings:
        report.damage(
            ".", "this run has no receipts: it is older than these, or has committed no step", code=NO_RECEIPTS
        )
    return report
