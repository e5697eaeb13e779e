"""Verifies a run: its chain of receipts, and with each receipt what the directory has of that step."""

from __future__ import annotations

from pathlib import Path

from counterpoint.verify.advantages import check_advantages
from counterpoint.verify.chain import receipts
from counterpoint.verify.files import Directory
from counterpoint.verify.formats import Rules
from counterpoint.verify.groups import Groups, check_shipped
from counterpoint.verify.records import read_records
from counterpoint.verify.report import BEING_WRITTEN, NO_RECEIPTS, Verdict
from counterpoint.verify.training import (
    check_ages,
    check_batch,
    check_filters,
    check_loads,
    check_weights,
    trained_batches,
)

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
    groups, trained_batch = Groups(), trained_batches(Directory(path.parent / "trainer" / report.run), report)
    rules: list[Rules] = []
    weights: dict[str, list[str]] = {}
    loads: dict[str, int] = {}
    code: dict[str, str] | None = None
    for receipt in receipts(run, report, head):
        if receipt.rules not in rules[:1]:
            rules = [receipt.rules, *rules][:MOST_RULES]
        if (trained_digest := trained_batch.pop(receipt.step, None)) is not None:
            report.checked["batches that the trainer's checkpoints name"] += 1
            if trained_digest != receipt.batch:
                what = f"it has trained another batch, {trained_digest}, than that of the receipt, {receipt.batch}"
                report.damage(f"trainer/{report.run}/checkpoints/step_{receipt.step}/state.json", what, receipt.step)
        if code not in (None, receipt.code):
            report.unchecked["what a change of an environment's code changed (steps)"] += 1
        code = receipt.code
        for version, digest in receipt.weights.items():
            weights.setdefault(version, []).append(digest)
        shipped = groups.take(receipt, report)
        recorded = read_records(run, receipt, report)
        if recorded is None:
            continue
        trained = [each for each in recorded if each.line.dropped is None]
        lines = [each.line for each in trained]
        try:
            check_shipped(receipt, shipped, lines, report)
            check_ages(receipt.step, lines, rules, weights, report)
            check_loads(receipt.step, lines, loads, report)
            check_advantages(receipt.step, lines, rules, report)
            check_filters(receipt.step, trained, rules, report)
            check_batch(run, receipt, trained, report)
        except (
            ArithmeticError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # values of any size and kind, `Unreadable` too
            what = f"nothing can be computed with it: {error}"
            report.damage(f"rollouts/step_{receipt.step}", what, receipt.step)
    check_weights(run, weights, report)
    if not report.steps and not report.findings:
        report.damage(
            ".", "this run has no receipts: it is older than these, or has committed no step", code=NO_RECEIPTS
        )
    return report
