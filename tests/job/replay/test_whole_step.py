"""The conclusion over the whole step that a dump is of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from counterpoint.cli.display.replay_tables import describe_whole_step
from counterpoint.cli.main import main
from counterpoint.job.replay.synthesize import Shape, header_of, synthetic_rollouts
from counterpoint.job.replay.whole_step import UNTIMED, whole_step
from counterpoint.orchestrator.rollouts.dump import write_dump
from tests.support.jobs import shipped_line, trained_line, write_lines

BOUNDARY = {"phase/merge": 0.1, "phase/records": 0.2, "phase/commit": 0.1, "phase/malloc_trim": 0.0}


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Where the dump of step 2 lies; it took 10 s, and its boundary 0.4 s of them. The path has
    what would close a tag of rich's markup."""
    run = tmp_path / "[" / "out]" / "run_a"
    write_lines(run / "metrics.jsonl", [shipped_line(1, 100.0), shipped_line(2, 110.0, **BOUNDARY)])
    trainer = trained_line(2, "a") | {"phase/wait": 6.0, "phase/train": 3.0, "phase/broadcast": 0.5}
    write_lines(run.parent / "trainer" / "metrics.jsonl", [trained_line(2, "b") | {"phase/wait": 1.0}, trainer])
    return run / "raw_rollouts" / "step_2"


def test_the_phases_of_a_step_are_told_and_add_up(dump: Path) -> None:
    found = whole_step(dump, 2)
    assert found is not None
    assert (found.run_id, found.step, found.seconds) == ("a", 2, 10.0)
    assert found.phases == pytest.approx({UNTIMED: 9.6, "boundary": 0.4})
    assert found.trainer == {"wait": 6.0, "train": 3.0, "broadcast": 0.5}
    assert found.longest == UNTIMED
    said = describe_whole_step(found)
    assert "step 2 of run a took 10.00 s" in said
    assert "takes most of it (96%); the trainer waits for rollouts (6.00 s of waiting, 3.50 s of work)" in said
    assert "would make the step 4.0% shorter" in said


def test_phases_that_the_run_names_itself_are_told_by_their_names(dump: Path) -> None:
    named = {"phase/generation": 7.0, "phase/wait_trainer": 2.6, "wall_seconds": 10.0}
    after_a_pause = shipped_line(3, 9000.0, **BOUNDARY, **named)
    write_lines(dump.parents[1] / "metrics.jsonl", [after_a_pause])
    found = whole_step(dump.with_name("step_3"), 3)
    assert found is not None
    assert found.seconds == 10.0
    assert found.phases == pytest.approx({"generation": 7.0, "wait_trainer": 2.6, "boundary": 0.4})
    assert found.longest == "generation"
    assert "generation takes most of it (70%). A boundary" in describe_whole_step(found), (
        "its trainer has not trained it"
    )


def test_a_boundary_that_takes_most_of_a_step_is_said_to(dump: Path) -> None:
    write_lines(dump.parents[1] / "metrics.jsonl", [shipped_line(3, 111.0, **{"phase/merge": 0.9})])
    found = whole_step(dump, 3)
    assert found is not None
    assert "boundary takes most of it (90%)" in found.conclusion


def test_of_a_dump_that_lies_elsewhere_the_boundary_alone_is_known(dump: Path, tmp_path: Path) -> None:
    assert whole_step(tmp_path / "dump", 2) is None
    assert whole_step(dump, 9) is None
    assert "not known" in describe_whole_step(None)


@pytest.mark.slow
@pytest.mark.usefixtures("short_baselines")
def test_replay_and_attribute_end_with_the_conclusion(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = Shape(rollouts=24, turns=6, tokens=600, layers=4, top_k=2, experts=8)
    dump.parent.mkdir()
    write_dump(dump, header_of(shape).model_copy(update={"run_id": "a", "step": 2}), synthetic_rollouts(shape))
    for command in (["replay"], ["attribute", "--quick"]):
        assert main([*command, str(dump)]) == 0
        *tables, step, trainer, conclusion = capsys.readouterr().out.rstrip().splitlines()
        assert "[/out]" in "".join(line.strip() for line in tables)
        assert "The whole step 2 of run a took 10.00 s" in step
        assert "wait 6.00 s, train 3.00 s, broadcast 0.50 s" in trainer
        assert conclusion.strip().startswith(UNTIMED)
    assert main(["replay", "--json", str(dump)]) == 0
    assert json.loads(capsys.readouterr().out)["whole_step"]["seconds"] == 10.0
