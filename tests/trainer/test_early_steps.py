"""What is trained before its commit counts with the commit of that very batch; otherwise the run is as before the step."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from counterpoint.run.changes import Change, write_journal
from counterpoint.trainer.fair_share import Row
from counterpoint.trainer.runs import copies
from counterpoint.trainer.work.contribution import Contribution
from counterpoint.transport.files.atomic import published_steps
from counterpoint.transport.messages import Bye, Hello
from counterpoint.transport.process.stop_requests import StopSignals
from counterpoint.transport.records import Batch
from tests.support.batches import with_changes
from tests.trainer.conftest import make_batch
from tests.trainer.one_process_trainer import Life, broadcast, life, write_member
from tests.trainer.orchestrator_end import metrics_lines

pytestmark = pytest.mark.slow


def batch_of(step: int, seed: int = 0) -> Batch:
    """Another one for each seed."""
    return replace(make_batch(step + 100 * seed, run_id="one"), step=step)


def train(one: Life, batch: Batch) -> None:
    """Undisturbed: the commit is there before the batch."""
    one.wire.commit("one", batch.step)
    one.wire.offer(batch)
    one.until_step(one=batch.step)


def begin_early(one: Life, batch: Batch) -> None:
    """Until all its rows are trained, without a commit."""
    step = one.run("one").progress.step
    one.wire.offer(batch)

    def begun() -> bool:
        step = contribution(one, "one")
        return step is not None and step.batch is batch

    one.turn_until(begun, "the early step")
    one.turn_until(lambda: not one.trainer.shared.shares.left(one.run("one").slot), "its rows")
    assert rows_trained(one) == len(batch.samples)
    assert one.step_of("one") == one.wire.acknowledged("one") == step, "nothing is trained yet"


def contribution(one: Life, run_id: str) -> Contribution | None:
    """The run's newest, if it has any since its last update."""
    return next(iter(one.learner.contributions.get(one.run(run_id).slot, [])[-1:]), None)


def rows_trained(one: Life) -> int:
    """The samples of the open step that were trained."""
    step = contribution(one, "one")
    return 0 if step is None else sum(map(len, step.trained_rows))


def check_equal(output_dir: Path, other_dir: Path, step: int) -> None:
    """Both have published the same adapter of this step."""
    found, expected = (broadcast(each, "one", step) for each in (output_dir, other_dir))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def undisturbed(directory: Path, model: Path, batch: Batch) -> Path:
    """Where a run has trained this batch alone."""
    write_member(directory, model, "one")
    with life(directory, model, {"one": 0}) as one:
        one.until_step(one=0)
        train(one, batch)
    return directory


def test_a_commit_completes_what_has_begun(dense_directory: Path, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "expected", dense_directory, batch_of(1))
    write_member(tmp_path, dense_directory, "one")
    with life(tmp_path, dense_directory, {"one": 0}) as one:
        one.until_step(one=0)
        begin_early(one, batch_of(1))
        for _ in range(3):
            one.turn()
        assert published_steps(tmp_path / "run_one" / "broadcast") == [0]
        assert rows_trained(one) == len(batch_of(1).samples), "once"
        one.wire.commit("one", 1)
        one.turn()
        assert one.step_of("one") == 1, "by what has begun"
    check_equal(tmp_path, expected, 1)


def new_session(one: Life) -> None:
    """The orchestrator was killed before its commit, and generates the step anew."""
    one.wire.say("one", Bye())
    one.turn()
    one.wire.say("one", Hello("one", 0))
    one.turn()
    assert contribution(one, "one") is None


def same_session(one: Life) -> None:
    """Another batch of the step comes at once."""


@pytest.mark.parametrize("between", [new_session, same_session])
def test_another_batch_is_trained_as_if_nothing_had_begun(
    between: Callable[[Life], None], dense_directory: Path, tmp_path: Path
) -> None:
    expected = undisturbed(tmp_path / "expected", dense_directory, batch_of(1, seed=1))
    write_member(tmp_path, dense_directory, "one")
    with life(tmp_path, dense_directory, {"one": 0}) as one:
        one.until_step(one=0)
        begin_early(one, batch_of(1))
        between(one)
        begin_early(one, batch_of(1, seed=1))
        one.wire.commit("one", 1)
        one.until_step(one=1)
    check_equal(tmp_path, expected, 1)


def test_another_batch_that_comes_with_its_commit_is_trained(dense_directory: Path, tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "expected", dense_directory, batch_of(1, seed=1))
    write_member(tmp_path, dense_directory, "one")
    with life(tmp_path, dense_directory, {"one": 0}) as one:
        one.until_step(one=0)
        begin_early(one, batch_of(1))
        one.wire.offer(batch_of(1, seed=1))
        one.wire.commit("one", 1)
        one.until_step(one=1)
    check_equal(tmp_path, expected, 1)


def test_a_rate_that_is_changed_meanwhile_counts(dense_directory: Path, tmp_path: Path) -> None:
    write_member(tmp_path, dense_directory, "one", learning_rate=1e-3)
    with life(tmp_path, dense_directory, {"one": 0}) as one:
        one.until_step(one=0)
        begin_early(one, batch_of(1))
        change = Change(request_id="change", step=1, changes={"training.learning_rate": 2e-3})
        write_journal(tmp_path / "run_one", [change])
        one.wire.commit("one", 1)
        one.until_step(one=1)
    assert [line["learning_rate"] for line in metrics_lines(tmp_path)] == [2e-3]


def test_a_copy_that_is_accepted_meanwhile_takes_the_place_of_the_update(dense_directory: Path, tmp_path: Path) -> None:
    for run_id in ("one", "other"):
        write_member(tmp_path, dense_directory, run_id, checkpoint_interval=1)
    with life(tmp_path, dense_directory, {"one": 0, "other": 2}) as one:
        one.until_step(one=0, other=2)
        begin_early(one, batch_of(1))
        copies.accept(tmp_path, "one", copies.Copy(1, "other", 2, False, None), one.run("one"))
        one.wire.commit("one", 1)
        one.until_step(one=1)
        assert contribution(one, "one") is None
    found, expected = broadcast(tmp_path, "one", 1), broadcast(tmp_path, "other", 2)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_run_that_is_evicted_meanwhile_keeps_its_last_step(dense_directory: Path, tmp_path: Path) -> None:
    write_member(tmp_path, dense_directory, "one")
    write_member(tmp_path, dense_directory, "other")
    with life(tmp_path, dense_directory, {"one": 0, "other": 0}) as one:
        one.until_step(one=0, other=0)
        begin_early(one, batch_of(1))
        one.trainer.shared.evict(one.run("one"), "an operator wants it")
        one.wire.committed["other"] = 2
        one.until_step(other=2)
    assert published_steps(tmp_path / "run_one" / "broadcast") == [0]


def test_a_stop_completes_open_steps_alone(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No commit is heard any more, so what has begun early would only hold them up."""
    for run_id in ("one", "other"):
        write_member(tmp_path, dense_directory, run_id)
    rows: list[Row] = []
    with life(tmp_path, dense_directory, {"one": 0, "other": 0}) as one:
        one.until_step(one=0, other=0)
        with monkeypatch.context() as patched:
            patched.setattr(one.trainer, "_train_rows", lambda: None)
            one.wire.offer(make_batch(1, (60,) * 8, run_id="one"))
            one.wire.commit("other", 1)
            one.wire.offer(make_batch(1, (60,) * 4, run_id="other"))
            one.turn_until(lambda: contribution(one, "one") is not None, "the early step")
            one.turn_until(lambda: one.trainer.shared.orders[one.run("other").slot].newest == 1, "the open step")
        train = one.learner.train_rows

        def train_and_note(given: Sequence[Row]) -> None:
            rows.extend(given)
            train(given)

        monkeypatch.setattr(one.learner, "train_rows", train_and_note)
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGTERM)
            one.trainer.serve(stop)
        assert (one.step_of("one"), one.step_of("other")) == (0, 1)
        assert {slot for row in rows for slot, _ in row} == {one.run("other").slot}


def test_a_batch_that_cannot_be_trained_evicts_its_run_with_its_commit_alone(
    dense_directory: Path, tmp_path: Path
) -> None:
    write_member(tmp_path, dense_directory, "one")
    good = batch_of(1)
    broken = with_changes(good, token_ids_T=np.full_like(good.token_ids_T, 2**20))
    with life(tmp_path, dense_directory, {"one": 0}) as one:
        one.until_step(one=0)
        one.wire.offer(broken)
        for _ in range(3):
            one.turn()
        assert one.wire.evicted == {}, "it may never be committed"
        one.wire.commit("one", 1)
        one.turn_until(lambda: bool(one.wire.evicted), "the eviction")
    assert "step 1" in one.wire.evicted["one"]
