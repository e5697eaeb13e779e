"""The last error of a log is one that still holds: an outage that is over is none."""

from __future__ import annotations

from pathlib import Path

from counterpoint.job.reading.log_errors import last_errors_of_guests
from counterpoint.transport.outages import OpenOutage, OutageKind


def last_error(directory: Path, *lines: str) -> str | None:
    (directory / "run_guest").mkdir(exist_ok=True)
    (directory / "run_guest" / "orchestrator.log").write_text("".join(f"12:00:00 {line}\n" for line in lines))
    return last_errors_of_guests(directory, ["guest"]).get("run guest")


def test_an_outage_that_is_over_is_no_last_error(tmp_path: Path) -> None:
    server = OpenOutage(OutageKind.SERVER, "inference server http://a:1", "takes no traffic", 1.0, "no answer")
    other = OpenOutage(OutageKind.SERVER, "inference server http://b:2", "takes no traffic", 1.0, "no answer")
    began = [f"ERROR   {each.who} {each.what}: {each.reason}" for each in (server, other)]
    over = [f"INFO    The outage is over: {each}" for each in (server, other)]
    assert last_error(tmp_path, *began) == f"12:00:00 {began[1]}"
    assert last_error(tmp_path, *began, over[1]) == f"12:00:00 {began[0]}"
    assert last_error(tmp_path, *began, *over) is None
    assert last_error(tmp_path, "ERROR   no space", *began, *over) == "12:00:00 ERROR   no space"
    assert last_error(tmp_path, *began, *over, began[0]) == f"12:00:00 {began[0]}"


def test_a_guest_whose_output_the_job_keeps_has_its_last_error(tmp_path: Path) -> None:
    (tmp_path / "run_guest").mkdir()
    (tmp_path / "orchestrator_guest.log").write_text("12:00:00 ERROR   no space\n")
    assert last_errors_of_guests(tmp_path, ["guest"]) == {"run guest": "12:00:00 ERROR   no space"}
