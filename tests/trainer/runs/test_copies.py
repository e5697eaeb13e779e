"""A copy of one run into another inside the trainer: bit for bit, at one step, and of nobody else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from counterpoint.job.population.exploit import (
    ExploitRefused,
    durable_steps,
    forget_saved,
    outcome,
    request_copy,
    request_save,
    wait,
)
from counterpoint.run.requests import withdraw_request
from counterpoint.trainer import commands
from counterpoint.trainer.fair_share import FairShare
from counterpoint.trainer.ranks import Ranks
from counterpoint.trainer.runs import copies
from counterpoint.trainer.updates.schedule import scheduled
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import published_steps, remove_directory
from counterpoint.transport.messages import Bye, Hello
from tests.trainer.conftest import make_batch
from tests.trainer.lone_run import ALONE
from tests.trainer.one_process_trainer import (
    STEPS,
    Life,
    broadcast,
    life,
    no_links,
    saved_state,
    write_member,
    write_population,
)
from tests.trainer.orchestrator_end import metrics_lines

pytestmark = pytest.mark.slow


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def own_copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def refused(one: Life, output_dir: Path, request_id: str, receiver: str = "loser") -> str:
    """The reason for which a request is refused within a pass."""
    one.turn()
    answer = outcome(output_dir, receiver, request_id)
    assert answer is not None
    assert answer.outcome == "refused"
    with pytest.raises(ExploitRefused):
        wait(output_dir, receiver, request_id, 0)
    return answer.reason


def train_alone(one: Life, run_id: str, batch_step: int) -> dict[str, Any]:
    """A step of one run, outside the trainer's loop."""
    slot, learner = one.run(run_id).slot, one.learner
    batch = make_batch(batch_step, run_id="shared")
    step = learner.open_step(slot, batch)
    shares = FairShare(one.config.max_tokens, 1)
    shares.add(
        slot, 1.0, {each: int(batch.sample_offsets[each + 1] - batch.sample_offsets[each]) for each in step.samples}
    )
    while shares.left(slot):
        learner.train_rows(shares.rows())
    run = one.run(run_id)
    position = batch_step + run.progress.schedule_offset
    return dict(learner.finish_step(slot, scheduled(run.config.training, run.config.last_step, position)))


@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize("training", [{}, {"optimizer": "sgd", "momentum": 0.9}])
def test_the_receiver_becomes_the_source_bit_for_bit_and_nobody_else_changes(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool, training: dict[str, Any]
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    write_population(tmp_path, dense_directory, **training)
    committed = {"winner": 2, "loser": 3, "third": 1}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
        source = own_copy(one.run("winner").torch.optimizer.state())
        others = {run_id: own_copy(one.run(run_id).torch.optimizer.state()) for run_id in ("winner", "third")}
        assert not same(source, own_copy(one.run("loser").torch.optimizer.state()))
        request = request_copy(tmp_path, "loser", "winner")
        one.turn()
        assert outcome(tmp_path, "loser", request) is None, "it takes the place of the next update"
        shutil.rmtree(tmp_path / "trainer" / "winner")  # it is accepted: the source may go
        committed["loser"] = 4
        one.until_step(loser=4)
        answer = wait(tmp_path, "loser", request, 0)
        assert (answer.step, answer.source_step) == (4, 2)
        assert same(own_copy(one.run("loser").torch.optimizer.state()), source)
        assert same(saved_state(tmp_path, "loser", 4), source), "durable at once"
        assert same(broadcast(tmp_path, "loser", 4), broadcast(tmp_path, "winner", 2)), (
            "inference loads it as any version"
        )
        for run_id, before in others.items():
            assert same(own_copy(one.run(run_id).torch.optimizer.state()), before), run_id
        committed["loser"] = STEPS
        one.until_step(loser=STEPS)
    lines = [line for line in metrics_lines(tmp_path) if line["run_id"] == "loser"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line.get("copied/run") for line in lines] == [None, None, None, "winner", None, None]
    assert lines[3]["copied/step"] == 2
    assert not list((tmp_path / "run_loser" / "control" / "requests").iterdir())
    assert not published_steps(copies.copies_directory(tmp_path, "loser")), "no checkpoint goes back before it"


@pytest.mark.parametrize("schedule", [True, False])
def test_the_next_update_is_that_of_a_run_that_had_been_the_source(
    dense_directory: Path, tmp_path: Path, schedule: bool
) -> None:
    training = {"lr_schedule": "cosine", "warmup_steps": 1, "weight_decay": 0.1, "learning_rate": 2e-3}
    write_population(tmp_path, dense_directory, **training)
    committed = {"winner": 2, "loser": 3, "third": 0}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
        request_copy(tmp_path, "loser", "winner", 2, schedule=schedule)
        committed["loser"] = 4
        one.until_step(loser=4)
        expected, found = (train_alone(one, run_id, step) for run_id, step in (("winner", 5), ("loser", 5)))
        assert found["loss"] == expected["loss"]
        assert found["grad_norm"] == expected["grad_norm"]
        if schedule:
            # The batch's number, 5, is that of the loser: its position is that of the winner after step 2, two behind.
            assert one.run("loser").progress.schedule_offset == -2
            position = {run_id: 5 + one.run(run_id).progress.schedule_offset for run_id in ("winner", "loser")}
            assert position == {"winner": 5, "loser": 3}
        else:
            assert found["learning_rate"] == expected["learning_rate"]
            assert same(*(own_copy(one.run(run_id).torch.optimizer.state()) for run_id in ("winner", "loser")))


class Follower(Ranks):
    """Another rank than 0, which gets these commands."""

    commands_to_follow: ClassVar[list[commands.AnyCommand]] = []

    def share(self, data: bytes | None) -> bytes:
        return commands.encode(self.commands_to_follow.pop(0))


def test_another_rank_copies_by_the_same_command(dense_directory: Path, tmp_path: Path) -> None:
    write_population(tmp_path, dense_directory)
    committed = {"winner": 2, "loser": 1, "third": 0}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
        request_copy(tmp_path, "loser", "winner")
        one.turn()
        loser = one.run("loser")
        Follower.commands_to_follow = [commands.PutCopy(loser.slot, 2), commands.Stop()]
        one.learner.ranks = Follower(1, 1, ALONE.device, None)
        one.learner.follow()
        assert loser.progress.step == 2
        assert same(own_copy(loser.torch.optimizer.state()), own_copy(one.run("winner").torch.optimizer.state()))


def test_the_schedules_position_is_the_sources_also_after_a_resume(dense_directory: Path, tmp_path: Path) -> None:
    write_population(tmp_path, dense_directory, lr_schedule="linear", warmup_steps=1, learning_rate=1e-3)
    committed = {"winner": 3, "loser": 4, "third": 0}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
        request_copy(tmp_path, "loser", "winner", 2, schedule=True)
        committed["loser"] = 5
        one.until_step(loser=5)
    committed["loser"] = STEPS
    with life(tmp_path, dense_directory, committed) as again:
        again.until_step(**committed)
    rates = {(line["run_id"], line["step"]): line.get("learning_rate") for line in metrics_lines(tmp_path)}
    assert rates["loser", 6] == rates["winner", 3], "the update after the source's second"
    assert rates["loser", 6] != rates["loser", 3] or rates["loser", 3] == rates["winner", 3]


def test_what_does_not_fit_is_refused_and_harms_nobody(dense_directory: Path, tmp_path: Path) -> None:
    write_population(tmp_path, dense_directory)
    lora = {"rank": 2, "target_modules": ["q_proj", "down_proj"]}
    strange: dict[str, dict[str, Any]] = {
        "rank": {"lora": {**lora, "rank": 4}},
        "alpha": {"lora": {**lora, "alpha": 8.0}},
        "layers": {"lora": {**lora, "target_modules": ["q_proj"]}},
        "optimizer": {"optimizer": "sgd"},
    }
    for run_id, training in strange.items():
        write_member(tmp_path, dense_directory, run_id, **training)
    committed = {"loser": 1, "winner": 1, "third": 0} | dict.fromkeys(strange, 2)
    with life(tmp_path, dense_directory, committed, max_runs=7) as one:
        one.until_step(**committed)
        before = own_copy(one.run("loser").torch.optimizer.state())
        reasons = {run_id: refused(one, tmp_path, request_copy(tmp_path, "loser", run_id)) for run_id in strange}
        assert "rank 4" in reasons["rank"]
        assert "rank 2" in reasons["rank"]
        assert "alpha 8" in reasons["alpha"]
        assert "target_modules" in reasons["layers"]
        assert "sgd" in reasons["optimizer"]
        assert "no durable step" in refused(one, tmp_path, request_copy(tmp_path, "loser", "winner"))
        assert "[2]" in refused(one, tmp_path, request_copy(tmp_path, "loser", "rank", 7))
        assert "no durable step" in refused(one, tmp_path, request_copy(tmp_path, "loser", "nobody"))
        outside = tmp_path / "outside"
        shutil.copytree(tmp_path / "trainer" / "rank" / "checkpoints", outside / "checkpoints")
        (tmp_path / "trainer" / "link").symlink_to(outside)
        assert "which is not this run's" in refused(one, tmp_path, request_copy(tmp_path, "loser", "link"))
        (tmp_path / "run_loser" / "control" / "requests" / "torn.json").write_text("{")
        assert "no request" in refused(one, tmp_path, "torn")
        assert one.wire.evicted == {}
        assert same(own_copy(one.run("loser").torch.optimizer.state()), before)
        assert not list(copies.copies_directory(tmp_path, "loser").glob("*"))
        committed["loser"] = STEPS
        one.until_step(loser=STEPS)
        assert "no step left" in refused(one, tmp_path, request_copy(tmp_path, "loser", "winner", 1))
    with pytest.raises(UserError, match="no run"):
        request_copy(tmp_path, "nobody", "winner")
    for bad in ("../winner", "/etc", ""):
        with pytest.raises(UserError):
            request_copy(tmp_path, "loser", bad)
        with pytest.raises(UserError):
            request_copy(tmp_path, bad, "winner")


def test_a_position_beyond_the_receivers_schedule_is_refused(
    dense_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All its updates would have the learning rate 0; where some would, the log says so."""
    write_population(tmp_path, dense_directory, lr_schedule="linear")
    write_member(tmp_path, dense_directory, "loser", steps=4, lr_schedule="linear")
    committed = {"winner": 4, "loser": 1, "third": 0}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
        reason = refused(one, tmp_path, request_copy(tmp_path, "loser", "winner", 4, schedule=True))
        assert "is 4, and run loser ends its own (lr_schedule = 'linear') at steps = 4" in reason
        request_copy(tmp_path, "loser", "winner", 4)
        one.wire.committed["loser"] = 4
        one.until_step(loser=4)
    origin = {"run": "winner", "step": 4, "schedule": True}
    write_member(tmp_path, dense_directory, "child", steps=4, lr_schedule="linear", start_from=origin)
    with life(tmp_path, dense_directory, {"child": 0}) as one:
        one.turn_until(lambda: "child" in one.wire.evicted, "the refusal")
        assert "copy it without schedule" in one.wire.evicted["child"]
    write_member(
        tmp_path, dense_directory, "child", steps=4, lr_schedule="linear", start_from={**origin, "schedule": False}
    )
    with life(tmp_path, dense_directory, {"child": 0}) as one:
        one.until_step(child=0)
    assert "its 4 steps have" not in caplog.text
    write_member(tmp_path, dense_directory, "early", steps=4, lr_schedule="linear", start_from={**origin, "step": 2})
    with life(tmp_path, dense_directory, {"early": 0}) as one:
        one.until_step(early=0)
    assert "the last 2 of its 4 steps have the learning rate 0" in caplog.text
    rates = [line.get("learning_rate") for line in metrics_lines(tmp_path) if line["run_id"] == "loser"]
    assert rates[1] is None
    assert rates[-1]


def test_a_request_made_again_is_the_same_one(dense_directory: Path, tmp_path: Path) -> None:
    write_population(tmp_path, dense_directory)
    committed = {"winner": 2, "loser": 1, "third": 0}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
        for _ in range(2):
            request_copy(tmp_path, "loser", "winner", request_id="once")
            one.turn()
        committed["loser"] = 4
        one.until_step(loser=4)
        request_copy(tmp_path, "loser", "winner", request_id="once")
        committed["loser"] = STEPS
        one.until_step(loser=STEPS)
    assert [line["step"] for line in metrics_lines(tmp_path) if "copied/run" in line] == [2]


def test_a_request_that_is_withdrawn_too_late_is_answered_and_its_journal_goes(
    dense_directory: Path, tmp_path: Path
) -> None:
    write_population(tmp_path, dense_directory)
    committed = {"winner": 2, "loser": 1, "third": 0}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
        early, late = request_copy(tmp_path, "loser", "winner"), request_copy(tmp_path, "loser", "winner")
        withdraw_request(tmp_path / "run_loser", early)
        one.turn()
        withdraw_request(tmp_path / "run_loser", late)
        committed["loser"] = STEPS
        one.until_step(loser=STEPS)
        assert outcome(tmp_path, "loser", early) is None
        assert wait(tmp_path, "loser", late, 0).step == 2
    assert [line["step"] for line in metrics_lines(tmp_path) if "copied/run" in line] == [2]
    assert not published_steps(copies.copies_directory(tmp_path, "loser"))


def test_a_step_that_is_trained_again_after_a_kill_is_not_taken_by_a_new_copy(
    dense_directory: Path, tmp_path: Path
) -> None:
    """Batches up to the last published version carry the versions of the history that was lost: those steps are trained again."""
    write_population(tmp_path, dense_directory, checkpoint_interval=2)
    committed = {"winner": 2, "loser": 3, "third": 0}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
    for _ in range(2):  # a second kill has no broadcast of step 3 to see
        with life(tmp_path, dense_directory, {**committed, "loser": 2}) as one:
            one.until_step(winner=2, loser=2)
            assert published_steps(tmp_path / "run_loser" / "broadcast") == [0, 1, 2]
    with life(tmp_path, dense_directory, committed) as one:
        request = request_copy(tmp_path, "loser", "winner")
        one.turn_until(lambda: bool(published_steps(copies.copies_directory(tmp_path, "loser"))), "the journal")
        committed["loser"] = STEPS
        one.until_step(loser=STEPS)
        assert wait(tmp_path, "loser", request, 0).step == 4


def test_a_new_run_starts_from_another_without_spending_a_batch(dense_directory: Path, tmp_path: Path) -> None:
    write_population(tmp_path, dense_directory, learning_rate=1e-3)
    committed = {"winner": 2, "loser": 0, "third": 0}
    with life(tmp_path, dense_directory, committed) as one:
        one.until_step(**committed)
    origin = {"run": "winner", "step": 2}
    write_member(tmp_path, dense_directory, "child", start_from=origin, learning_rate=1e-3)
    write_member(tmp_path, dense_directory, "orphan", start_from={"run": "nobody"})
    write_member(tmp_path, dense_directory, "odd", start_from=origin, lora={"rank": 3})
    committed = {"winner": 3, "child": 0, "orphan": 0, "odd": 0}
    with life(tmp_path, dense_directory, committed, max_runs=4) as one:
        one.until_step(winner=2, child=0)
        one.turn_until(lambda: {"orphan", "odd"} <= one.wire.evicted.keys(), "the refusals")
        assert "no durable step" in one.wire.evicted["orphan"]
        assert "rank 2" in one.wire.evicted["odd"]
        assert same(saved_state(tmp_path, "winner", 2), own_copy(one.run("child").torch.optimizer.state()))
        assert same(broadcast(tmp_path, "child", 0), broadcast(tmp_path, "winner", 2))
    shutil.rmtree(tmp_path / "trainer" / "winner")  # and the child begins anew: it has its own copy
    with life(tmp_path, dense_directory, {"child": 0}) as one:
        one.until_step(child=0)
        assert same(broadcast(tmp_path, "child", 0), broadcast(tmp_path, "winner", 2))
        one.wire.committed["child"] = 2
        one.until_step(child=2)


def test_a_save_is_durable_at_once_and_kept_until_it_is_forgotten(dense_directory: Path, tmp_path: Path) -> None:
    write_population(tmp_path, dense_directory, checkpoint_interval=99)
    committed = {"winner": 3, "loser": 0, "third": 0}
    with life(tmp_path, dense_directory, committed, keep_checkpoints=1) as one:
        one.until_step(**committed)
        assert "nothing is trained" in refused(one, tmp_path, request_save(tmp_path, "loser"))
        request = request_save(tmp_path, "winner")
        one.turn()
        assert wait(tmp_path, "winner", request, 0).step == 3
        state = saved_state(tmp_path, "winner", 3)
        committed["winner"] = STEPS
        one.until_step(winner=STEPS)
        assert published_steps(tmp_path / "trainer" / "winner" / "checkpoints") == [STEPS]
        assert durable_steps(tmp_path, "winner") == [3, STEPS]
        request = request_copy(tmp_path, "loser", "winner", 3)
        committed["loser"] = 1
        one.until_step(loser=1)
        assert wait(tmp_path, "loser", request, 0).step == 1
        assert same(saved_state(tmp_path, "loser", 1), state)
        forget_saved(tmp_path, "winner", 3)
        assert durable_steps(tmp_path, "winner") == [STEPS]


def test_a_copy_of_a_save_does_not_depend_on_a_checkpoint_that_is_removed_meanwhile(
    dense_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes checkpoints removes older ones while the trainer links one of them."""
    write_population(tmp_path, dense_directory, checkpoint_interval=99)
    committed = {"winner": 2, "loser": 0, "third": 0}
    with life(tmp_path, dense_directory, committed, keep_checkpoints=1) as one:
        one.until_step(**committed)
        request_save(tmp_path, "winner")
        one.turn()
        assert published_steps(tmp_path / "trainer" / "winner" / "saved") == [2]
        check = copies._check_fits

        def check_and_lose(*arguments: Any) -> None:
            check(*arguments)
            remove_directory(tmp_path / "trainer" / "winner" / "checkpoints" / "step_2")

        monkeypatch.setattr(copies, "_check_fits", check_and_lose)
        copies.accept(tmp_path, "loser", copies.Copy(1, "winner", 2, False, None), None)
    assert copies.accepted_steps(tmp_path, "loser") == [1]


def test_a_paused_run_gives_its_slot_up_and_goes_on_from_its_save(dense_directory: Path, tmp_path: Path) -> None:
    write_population(tmp_path, dense_directory, checkpoint_interval=99)
    committed = {"winner": 2, "loser": 0}
    with life(tmp_path, dense_directory, committed, max_runs=2) as one:
        one.until_step(**committed)
        request = request_save(tmp_path, "winner")
        one.turn()
        assert wait(tmp_path, "winner", request, 0).step == 2
        one.wire.say("winner", Bye())
        one.wire.committed["third"] = 1
        one.wire.say("third", Hello("third", 0))
        one.until_step(third=1)
        assert one.step_of("winner") == -1, "its slot is another's"
        one.wire.say("third", Bye())
        one.wire.committed["winner"] = STEPS
        one.wire.say("winner", Hello("winner", 0))
        one.until_step(winner=STEPS)
        write_member(tmp_path, dense_directory, "winner", steps=STEPS + 2, checkpoint_interval=99, learning_rate=3e-3)
        one.wire.committed["winner"] = STEPS + 2
        one.until_step(winner=STEPS + 2)  # at its limit, and joined again with a later one
    steps = [line["step"] for line in metrics_lines(tmp_path) if line["run_id"] == "winner"]
    assert steps == list(range(1, STEPS + 3))
