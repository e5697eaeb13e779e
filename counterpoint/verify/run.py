"""Verifies a run: its chain of receipts, and with each receipt what the directory has of that step."""

from __future__ import annotations

from pathlib import Path

from counterpoint.verify.chain import receipts
from counterpoint.verify.files import Directory
from counterpoint.verify.groups import Groups, check_shipped
from counterpoint.verify.records import read_records
from counterpoint.verify.report import BEING_WRITTEN, NO_RECEIPTS, Report


def verify(path: Path, head: str | None = None) -> Report:
    """Checks the run in the directory `path` (`run_<id>`). `head` is the hash of a receipt that the chain must have.

    Raises `OSError` if the directory cannot be read.
    """
    run = Directory(path)
    report = Report(path.name.removeprefix("run_"))
    if run.is_being_written():
        report.damage(".", "an orchestrator writes this run now; verify it once that has ended", code=BEING_WRITTEN)
        return report
    groups = Groups()
    for receipt in receipts(run, report, head):
        shipped = groups.take(receipt, report)
        recorded = read_records(run, receipt, report)
        if recorded is not None:
            check_shipped(receipt, shipped, recorded, report)
    if not report.steps and not report.findings:
        report.damage(
            ".", "this run has no receipts: it is older than these, or has committed no step", code=NO_RECEIPTS
        )
    return report
