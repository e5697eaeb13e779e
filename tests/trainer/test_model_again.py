"""A trainer of one slot whose runs train an adapter and full weights in turn: it holds one model at a time."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from counterpoint.trainer.faults import ModelLost
from counterpoint.trainer.model.load import load_model
from counterpoint.transport.messages import Bye, Hello
from tests.trainer.conftest import make_run_config
from tests.trainer.one_process_trainer import life, write_member
from tests.trainer.orchestrator_end import write_run

pytestmark = pytest.mark.slow

KINDS = ("adapter", "full", "later")


def test_the_former_model_is_given_back_before_it_is_loaded_again(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def load_and_count(*arguments: Any) -> Any:
        alive.append(sum(each() is not None for each in former))
        return load_model(*arguments)

    monkeypatch.setattr("counterpoint.trainer.loaded_model.load_model", load_and_count)
    for run_id in ("adapter", "later"):
        write_member(tmp_path, dense_directory, run_id, steps=1)
    full = make_run_config(tmp_path, dense_directory, steps=1).model_copy(update={"run_id": "full"})
    write_run(full)
    with life(tmp_path, dense_directory, {"adapter": 1}, max_runs=1) as one:
        for run_id in KINDS:
            if run_id != "adapter":
                one.wire.committed[run_id] = 1
                one.wire.say(run_id, Hello(run_id, 0))
            one.until_step(**{run_id: 1})
            former += map(weakref.ref, one.learner.loaded.model.parameters())
            one.wire.say(run_id, Bye())
        assert len(former) > len(KINDS)
    assert alive == [0, 0, 0]


def test_a_model_that_cannot_be_loaded_again_ends_the_trainer_by_its_name(
    dense_directory: Path, tmp_path: Path
) -> None:
    """There is no model for any run then. The error is no hook's, so that `train` reports it and exits with 1."""
    model = shutil.copytree(dense_directory, tmp_path / "model")
    write_member(tmp_path, model, "adapter", steps=1)
    write_run(make_run_config(tmp_path, model, steps=1).model_copy(update={"run_id": "full"}))
    with life(tmp_path, model, {"adapter": 1}, max_runs=1) as one:
        one.until_step(adapter=1)
        (model / "config.json").unlink()
        one.wire.say("adapter", Bye())
        one.wire.committed["full"] = 1
        one.wire.say("full", Hello("full", 0))
        with pytest.raises(ModelLost, match=rf"{model} cannot be loaded again"):
            one.until_step(full=1)
