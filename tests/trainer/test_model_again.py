"""A trainer of one slot whose runs train an adapter and full weights in turn: it holds one model at a time."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import make_run_config
from tests.trainer.one_process_trainer import life, write_member
from tests.trainer.orchestrator_end import write_run
from trainer.model.load import load_model
from transport.messages import Bye, Hello

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

    monkeypatch.setattr("trainer.loaded_model.load_model", load_and_count)
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
