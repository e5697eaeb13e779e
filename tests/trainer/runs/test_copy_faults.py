"""A copy that was accepted, and is damaged or no longer fits when its step is due."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counterpoint.job.population.exploit import request_copy
from counterpoint.trainer.runs import copies
from tests.trainer.one_process_trainer import STEPS, life, saved_state, write_member, write_population
from tests.trainer.orchestrator_end import metrics_lines
from tests.trainer.runs.test_copies import own_copy, same

pytestmark = pytest.mark.slow


def test_a_damaged_copy_costs_its_receiver_no_step(dense_directory: Path, tmp_path: Path) -> None:
    write_population(tmp_path, dense_directory, checkpoint_interval=99)
    write_member(tmp_path, dense_directory, "winner", checkpoint_interval=2)
    committed = {"winner": 2, "loser": 3, "third": 0}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
        before = own_copy(one.run("loser").torch.optimizer.state())
        request_copy(tmp_path, "loser", "winner")
        one.turn()
        journal = copies.copies_directory(tmp_path, "loser") / "step_4"
        (journal / "state.safetensors").unlink()  # not the source's, which it is a link to
        (journal / "state.safetensors").write_bytes(b"damaged")
        one.wire.committed["loser"] = 4
        one.turn_until(lambda: "loser" in one.wire.evicted, "the eviction")
        assert str(journal) in one.wire.evicted["loser"]
        one.turn()
    assert same(saved_state(tmp_path, "loser", 3), before)
    shutil.rmtree(journal)
    (tmp_path / "run_loser" / "control" / "evicted.txt").unlink()
    with life(tmp_path, dense_directory, {"loser": STEPS}) as again:
        again.until_step(loser=STEPS)
    steps = [line["step"] for line in metrics_lines(tmp_path) if line["run_id"] == "loser"]
    assert steps == list(range(1, STEPS + 1))


def rewritten(**changes: Any) -> Callable[[Path], None]:
    """Replaces keys of `state.json`, which is a link to the source's."""

    def change(journal: Path) -> None:
        path = journal / "state.json"
        described = json.loads(path.read_text()) | changes
        path.unlink()
        path.write_text(json.dumps(described))

    return change


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (rewritten(progress=5), "state.json is 5; expected a table"),
        (rewritten(progress=None), "state.json is None; expected a table"),
        (rewritten(progress={"step": 2, "schedule_offset": [1]}), "expected a table of whole numbers"),
        (rewritten(progress={}), "is of step None"),
        (rewritten(training={"optimizer": "adamw", "lora": {"rank": [1]}}), "an adapter of rank [1] and alpha None"),
        (None, "MemoryError('no more')"),
    ],
)
def test_any_damage_of_a_copy_evicts_its_receiver_alone(
    dense_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None] | None,
    said: str,
) -> None:
    """The other ranks wait for what this one has found, whatever it is."""
    write_population(tmp_path, dense_directory, checkpoint_interval=99)
    write_member(tmp_path, dense_directory, "winner", checkpoint_interval=2)
    committed = {"winner": 2, "loser": 1, "third": 0}

    def lacks_memory(*_: Any) -> None:
        raise MemoryError("no more")

    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
        request_copy(tmp_path, "loser", "winner")
        one.turn()
        if damage is None:
            monkeypatch.setattr(copies, "load_file", lacks_memory)
        else:
            damage(copies.copies_directory(tmp_path, "loser") / "step_2")
        committed["loser"] = 2
        one.turn_until(lambda: "loser" in one.wire.evicted, "the eviction")
        assert said in one.wire.evicted["loser"]
        committed["third"] = 1
        one.until_step(third=1)


def test_steps_that_are_lowered_after_a_copy_was_accepted_do_not_undo_it(
    dense_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its journal would refuse the step forever, and nothing is damaged."""
    write_population(tmp_path, dense_directory, checkpoint_interval=1, lr_schedule="linear")
    write_member(tmp_path, dense_directory, "loser", steps=9, checkpoint_interval=1, lr_schedule="linear")
    committed = {"winner": 6, "loser": 2, "third": 0}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
        request_copy(tmp_path, "loser", "winner", schedule=True)
        one.turn()
        assert copies.accepted_steps(tmp_path, "loser") == [3]
    write_member(tmp_path, dense_directory, "loser", steps=5, checkpoint_interval=1, lr_schedule="linear")
    with life(tmp_path, dense_directory, {"loser": 5}) as two:
        two.until_step(loser=5)
        assert not two.wire.evicted
    assert "the last 2 of its 5 steps have the learning rate 0; raise steps by 3, or copy" in caplog.text
