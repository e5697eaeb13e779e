"""Notes and tags of a run: those of its file, then those that were written; bounded, whatever the file holds."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import counterpoint.cli.steering  # noqa: F401  (threads of a test run its command)
from counterpoint.cli.main import main
from counterpoint.job.admin.ask import NotThere, Refused, checked
from counterpoint.job.admin.note import NoteChange, Noted
from counterpoint.job.admin.note import note_run as _note_run
from counterpoint.job.inspection.notes import notes_of
from counterpoint.run.notes import LONGEST_NOTES, MOST_TAGS, NO_NOTES, NOTES_FILE, read_notes
from counterpoint.transport.errors import UserError


def note_run(job: Path, run_id: str, **asked: object) -> Noted:
    return _note_run(job, run_id, checked(NoteChange, run_id, **asked))


@pytest.fixture
def job(tmp_path: Path) -> Path:
    for run_id in ("a", "b"):
        control = tmp_path / f"run_{run_id}" / "control"
        control.mkdir(parents=True)
        (control / "orch.toml").write_text('notes = "as configured"\ntags = ["baseline"]\n[sampling]\n')
    (tmp_path / "job.json").write_text(json.dumps({"runs": [{"run_id": run_id, "steps": 3} for run_id in ("a", "b")]}))
    return tmp_path


def test_what_is_written_stands_in_place_of_what_is_configured(job: Path) -> None:
    assert notes_of(job, "a").tags == ["baseline"]
    noted = note_run(job, "a", tags=["baseline", "lr=1e-5", "baseline"])
    assert (noted.tags, noted.notes) == (["baseline", "lr=1e-5"], "as configured")
    assert note_run(job, "a", notes="").notes == ""
    assert notes_of(job, "a").tags == ["baseline", "lr=1e-5"], "a file, which survives any restart"
    assert notes_of(job, "b").notes == "as configured"


@pytest.mark.parametrize(
    "tags", [["two words"], ["<b>"], [""], ["x" * 41], ["-x"], [str(n) for n in range(MOST_TAGS + 1)]]
)
def test_what_is_no_tag_is_refused_and_nothing_is_written(job: Path, tags: list[str]) -> None:
    with pytest.raises(UserError, match="tags"):
        note_run(job, "a", tags=tags)
    with pytest.raises(UserError, match=f"notes.*at most {LONGEST_NOTES} characters"):
        note_run(job, "a", notes="x" * (LONGEST_NOTES + 1))
    assert not (job / "run_a" / NOTES_FILE).exists()


def test_two_that_write_at_once_lose_nothing(job: Path) -> None:
    tags = [f"t{number}" for number in range(8)]

    def add(tag: str) -> None:
        assert main(["note", "a", "--job", str(job), "--tag", tag]) == 0

    with ThreadPoolExecutor() as threads:
        writing = threads.submit(note_run, job, "a", notes="what they all keep")
        list(threads.map(add, tags))
        writing.result()
    found = notes_of(job, "a")
    assert (found.notes, sorted(found.tags)) == ("what they all keep", ["baseline", *tags])


def test_a_run_that_is_not_there_is_not_annotated(job: Path) -> None:
    with pytest.raises(NotThere):
        note_run(job, "../a", notes="x")


@pytest.mark.parametrize(
    "content", [b"\xff", b"[]", b'{"tags": ["<b>"]}', b'{"notes": 1}', b'{"other": 1}', b"x" * 2**20]
)
def test_a_damaged_file_says_so(job: Path, content: bytes) -> None:
    (job / "run_a" / NOTES_FILE).write_bytes(content)
    found = read_notes(job / "run_a")
    assert found is not None
    assert (found.notes, found.tags) == (f"{NOTES_FILE} cannot be read", [])
    with pytest.raises(Refused, match=NOTES_FILE):
        note_run(job, "a", tags=["paper"])
    assert (job / "run_a" / NOTES_FILE).read_bytes() == content


def test_a_configuration_of_another_s_making_has_no_notes_that_are_none(job: Path) -> None:
    (job / "run_a" / "control" / "orch.toml").write_text('notes = 1\ntags = "all"\n')
    assert notes_of(job, "a") == NO_NOTES


def test_the_command_writes_and_prints(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["note", "a", "--job", str(job), "--text", "diverged\x1b[2J", "--tag", "bad", "--untag", "baseline"]) == 0
    )
    assert capsys.readouterr().out == "run a: [bad] diverged\\x1b[2J\n"
    assert main(["note", "--job", str(job), "--tag", "paper", "--json"]) == 0
    assert [(each["run_id"], each["tags"]) for each in json.loads(capsys.readouterr().out)] == [
        ("a", ["bad", "paper"]),
        ("b", ["baseline", "paper"]),
    ]
    assert main(["note", "a", "--job", str(job), "--tag", "no tag"]) == 2
    assert notes_of(job, "a").tags == ["bad", "paper"]
