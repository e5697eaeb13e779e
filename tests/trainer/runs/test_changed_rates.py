"""The learning rate that a change names holds from its step on, at the trainer, also where steps are trained again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from counterpoint.run.changes import Change, write_journal
from tests.trainer.one_process_trainer import life, write_member
from tests.trainer.orchestrator_end import metrics_lines

pytestmark = pytest.mark.slow


def test_every_step_has_the_rate_that_holds_for_it(dense_directory: Path, tmp_path: Path) -> None:
    write_member(tmp_path, dense_directory, "one", learning_rate=1e-3, checkpoint_interval=99, lr_schedule="linear")
    write_member(tmp_path, dense_directory, "other", learning_rate=1e-3, checkpoint_interval=99)
    change = Change(request_id="change", step=3, changes={"training.learning_rate": 2e-3})
    committed = {"one": 2, "other": 2}
    for _ in range(2):  # killed without a checkpoint, all steps are trained again
        with life(tmp_path, dense_directory, committed) as one:
            one.until_step(**committed)
            write_journal(tmp_path / "run_one", [change])
            committed |= {"one": 4, "other": 4}
            one.until_step(one=4, other=4)
        rates = {(line["run_id"], line["step"]): line["learning_rate"] for line in metrics_lines(tmp_path)}
        linear = [1 - step / 6 for step in range(4)]
        expected = [1e-3 * linear[0], 1e-3 * linear[1], 2e-3 * linear[2], 2e-3 * linear[3]]
        assert [rates["one", step] for step in (1, 2, 3, 4)] == pytest.approx(expected)
        assert {rates["other", step] for step in (1, 2, 3, 4)} == {1e-3}


def journal_with(rate: str) -> str:
    changes = f'{{"training.learning_rate": {rate}}}'
    return f'{{"format": 1, "changes": [{{"request_id": "a", "step": 1, "changes": {changes}}}]}}'


@pytest.mark.parametrize("journal", ["[]", journal_with('"much"'), journal_with("[" * 1000 + "]" * 1000)])
def test_a_journal_that_cannot_be_used_evicts_its_run_alone(
    dense_directory: Path, tmp_path: Path, journal: str
) -> None:
    assert "changes.json" in evicted_with(
        dense_directory, tmp_path, lambda control: (control / "changes.json").write_text(journal)
    )


def test_a_control_directory_that_leads_to_itself_lets_its_run_alone_wait(
    dense_directory: Path, tmp_path: Path
) -> None:
    """It may be put right, as what is not seen may be there; the run is told which file is missed."""
    for run_id in ("one", "other"):
        write_member(tmp_path, dense_directory, run_id)
    committed = {"one": 1, "other": 1}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
        control = tmp_path / "run_one" / "control"
        control.rename(control.with_name("away"))
        control.symlink_to("control")
        one.wire.committed |= {"one": 2, "other": 3}
        one.until_step(other=3)
        one.turn_until(lambda: "orch.toml" in one.wire.waiting.get("one", ""), "the reason of the wait")
        assert not one.wire.evicted


def evicted_with(dense_directory: Path, tmp_path: Path, break_control: Callable[[Path], object]) -> str:
    """Breaks a run's `control/` between two steps; returns why it is evicted, once the other run has gone on."""
    for run_id in ("one", "other"):
        write_member(tmp_path, dense_directory, run_id)
    committed = {"one": 1, "other": 1}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
        break_control(tmp_path / "run_one" / "control")
        one.wire.committed |= {"one": 2, "other": 3}
        one.until_step(other=3)
        one.turn_until(lambda: "one" in one.wire.evicted, "the eviction")
        return one.wire.evicted["one"]
