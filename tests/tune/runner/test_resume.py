"""An experiment goes on where its journal ends, after a kill at any step, a stop in order, or on another machine."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from counterpoint.transport.files.journal import FileJournal
from counterpoint.tune.callbacks.defaults import with_default_loggers
from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors.executor import Event
from counterpoint.tune.result import Result
from counterpoint.tune.runner import trial_files, trial_runner
from counterpoint.tune.runner.journal import JOURNAL, holds_experiment
from counterpoint.tune.runner.trial_runner import TrialRunner
from counterpoint.tune.schedulers.scheduler import Trials, TrialScheduler
from counterpoint.tune.stoppers.stopper import Stopper
from counterpoint.tune.trial import Trial
from tests.tune.runner.scripted import ScriptedExecutor, ScriptedTrials, run_to_the_end
from tests.tune.runner.test_trial_runner import Listener, lines_of

pytestmark = pytest.mark.slow  # many runners, one after the other

SCRIPTS: list[list[Any]] = [[1, 2, 3], [4, "die once", 6], [7], ["die"], [8, 9]]


def runner_at(place: Path, resume: Any = "AUTO", scripts: list[list[Any]] = SCRIPTS, **arguments: Any) -> TrialRunner:
    return TrialRunner(
        ScriptedTrials(place, scripts, max_failures=2, checkpoint_freq=1, keep_checkpoints_num=1),
        local_checkpoint_dir=place,
        trial_executor=arguments.pop("executor", None) or ScriptedExecutor(),
        resume=resume,
        callbacks=with_default_loggers(arguments.pop("callbacks", None)),
        metric="value",
        **arguments,
    )


def abandon(runner: TrialRunner) -> None:
    """Leaves everything as a SIGKILL does, except the thread and the descriptors of this process."""
    if runner._search is not None:
        runner._search.close()
    if runner._private is not None:
        runner._private.close()
    journal = runner._experiment._journal
    assert journal is not None
    journal.close()
    os.close(runner._experiment._lock)


def check_whole(runner: TrialRunner) -> None:
    """Each result of each trial was counted and written once, and the search algorithm heard all."""
    trials = {trial.trial_id: trial for trial in runner.get_trials()}
    assert [trials[f"t{n}"].status for n in range(1, 6)] == [
        "TERMINATED",
        "TERMINATED",
        "TERMINATED",
        "ERROR",
        "TERMINATED",
    ]
    for trial in trials.values():
        assert trial.num_failures <= 3
        if trial.num_results:
            assert [line["training_iteration"] for line in lines_of(trial)] == list(range(1, trial.num_results + 1))
    assert [trials[f"t{n}"].num_results for n in range(1, 6)] == [3, 3, 1, 0, 2]
    heard = runner.search_alg.state()["heard"]
    assert sorted(map(str, heard)) == sorted(
        map(
            str,
            [[f"t{n}", k] for n, count in enumerate([3, 3, 1, 0, 2], 1) for k in range(1, count + 1)]
            + [["t1", "complete"], ["t2", "complete"], ["t3", "complete"], ["t4", "error"], ["t5", "complete"]],
        )
    )


@pytest.mark.parametrize("every", [2, 3, 5, 8, 13])
def test_an_experiment_survives_kills_at_any_step(tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some runners write a snapshot.
    monkeypatch.setattr("counterpoint.tune.runner.journal.SMALLEST", 400 * every)
    for _ in range(200):
        runner = runner_at(tmp_path)
        for _ in range(every + 5):
            if not runner.is_finished():
                runner.step()
        if runner.is_finished():
            runner.close()
            check_whole(runner)
            return
        abandon(runner)
    raise AssertionError("it never came to its end")


def test_a_kill_between_the_journal_and_what_follows_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_at(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(trial_runner.TrialRunner, "_act", lambda self, instruction: None)  # decided, durable, not done
        for _ in range(3):
            runner.step()
    abandon(runner)
    runner = runner_at(tmp_path)
    run_to_the_end(runner)
    check_whole(runner)


class Breaks(TrialScheduler):
    """Raises at a result after `broken` is set."""

    broken = False

    def on_trial_result(self, trials: Trials, trial: Trial, result: Result) -> str:
        if self.broken:
            raise RuntimeError("a scheduler with a defect")
        return self.CONTINUE


def all_events_of(executor: ScriptedExecutor) -> Callable[[float], Awaitable[Sequence[Event]]]:
    async def next_events(timeout: float) -> Sequence[Event]:
        events = list(executor.due)
        executor.due.clear()
        return events

    return next_events


@pytest.mark.parametrize("what", ["scheduler", "act", "stopper"])
def test_an_experiment_that_breaks_off_is_resumed_without_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def fail(*given: Any) -> None:
        raise OSError("a disk with a defect")

    for steps in range(4, 12):
        place = tmp_path / str(steps)
        with monkeypatch.context() as patch:
            executor = ScriptedExecutor()
            runner = runner_at(place, scheduler=Breaks(), executor=executor)
            for _ in range(steps):
                runner.step()
            patch.setattr(executor, "next_events", all_events_of(executor))
            if what == "scheduler":
                patch.setattr(Breaks, "broken", True)
            elif what == "act":
                patch.setattr(runner, "_act", fail)
            else:
                patch.setattr(Stopper, "__call__", fail)
            with pytest.raises((TuneError, OSError), match="with a defect"):
                run_to_the_end(runner)
        runner = runner_at(place, scheduler=Breaks())
        run_to_the_end(runner)
        check_whole(runner)


def test_half_a_record_at_the_end_is_cut_off(tmp_path: Path) -> None:
    runner = runner_at(tmp_path)
    for _ in range(12):
        runner.step()
    abandon(runner)
    os.truncate(tmp_path / JOURNAL, (tmp_path / JOURNAL).stat().st_size - 3)
    runner = runner_at(tmp_path)
    run_to_the_end(runner)
    check_whole(runner)


def test_damage_in_the_middle_is_refused_with_its_place(tmp_path: Path) -> None:
    runner = runner_at(tmp_path)
    for _ in range(12):
        runner.step()
    abandon(runner)
    path = tmp_path / JOURNAL
    data = path.read_bytes()
    for place in (0, 20, 30, len(data) - 1):  # the first entry, a length, a checksum, the last record
        damaged = bytearray(data)
        damaged[place] ^= 0x40
        path.write_bytes(damaged)
        with pytest.raises(TuneError, match=r"damaged at byte \d\d" if place > 30 else r"damaged at byte \d"):
            runner_at(tmp_path)


def as_of_before(directory: Path, *, snapshot: bool) -> None:
    """Writes what a directory holds as versions did that had snapshots and journals in files of their own."""
    journal = FileJournal(directory / JOURNAL, 0)
    records = [bytes(record) for record in journal.replay()]
    journal.close()

    def entry(body: bytes) -> bytes:
        sizes = struct.pack("<QI", len(body), zlib.crc32(body))
        return sizes + struct.pack("<I", zlib.crc32(sizes)) + body

    if snapshot:
        (directory / "experiment_snapshot_000007.msgpack").write_bytes(entry(records.pop(0)))
        (directory / "experiment_journal_000006.msgpack").write_bytes(b"left by a kill")
    name = f"experiment_journal_{7 * snapshot:06d}.msgpack"
    (directory / name).write_bytes(b"".join(map(entry, records)) + entry(b"half a record")[:-3])


@pytest.mark.parametrize("snapshot", [False, True])
def test_an_experiment_of_before_goes_on(tmp_path: Path, snapshot: bool) -> None:
    runner = runner_at(tmp_path)
    for step in range(12):
        runner.step()
        if step == 6 and snapshot:
            runner.checkpoint(force=True)
    abandon(runner)
    as_of_before(tmp_path, snapshot=snapshot)
    (tmp_path / JOURNAL).unlink()
    assert holds_experiment(tmp_path)
    runner = runner_at(tmp_path, resume=True)
    assert [path.name for path in tmp_path.glob("experiment*") if path.suffix in (".msgpack", ".journal")] == [JOURNAL]
    abandon(runner)
    as_of_before(tmp_path, snapshot=snapshot)  # a kill between the new file and the removal of the former ones
    runner = runner_at(tmp_path, resume=True)
    run_to_the_end(runner)
    check_whole(runner)


@pytest.mark.parametrize("kind", ["snapshot", "journal"])
def test_a_damaged_experiment_of_before_is_refused_and_left(tmp_path: Path, kind: str) -> None:
    runner = runner_at(tmp_path)
    for _ in range(6):
        runner.step()
    runner.checkpoint(force=True)
    runner.step()
    abandon(runner)
    as_of_before(tmp_path, snapshot=True)
    (tmp_path / JOURNAL).unlink()
    path = tmp_path / f"experiment_{kind}_000007.msgpack"
    content = bytearray(path.read_bytes())
    for damaged in [content[:20] + b"?" + content[21:]] + [content[:-3]] * (kind == "snapshot"):
        path.write_bytes(damaged)
        with pytest.raises(TuneError, match=f"{path} is damaged at byte 0"):
            runner_at(tmp_path)
        assert path.read_bytes() == damaged


def test_what_a_snapshot_holds_is_not_in_the_journal_again(tmp_path: Path) -> None:
    runner = runner_at(tmp_path)
    runner.step()
    added = Trial(**{**runner.get_trials()[0].as_dict(), "trial_id": "added", "dirname": ""})
    runner.add_trial(added)
    runner.checkpoint(force=True)
    runner.step()
    abandon(runner)
    runner = runner_at(tmp_path)
    assert [trial.trial_id for trial in runner.get_trials()].count("added") == 1
    abandon(runner)


def test_two_runners_never_act_on_one_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.tune.runner.journal.LOCK_SECONDS", 0.0)
    runner = runner_at(tmp_path)
    with pytest.raises(TuneError, match=f"process {os.getpid()} on .* runs this experiment"):
        runner_at(tmp_path)
    run_to_the_end(runner)


def test_a_resume_says_so_and_another_can_see_it_soon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_to_the_end(runner_at(tmp_path, scripts=[[1]], verbose=1))
    assert "goes on" not in capsys.readouterr().err
    again = runner_at(tmp_path, scripts=[[1]], verbose=1, checkpoint_period=3600.0)
    assert "goes on with 1 trials: 1 TERMINATED" in capsys.readouterr().err
    (tmp_path / trial_files.STATE_FILE).unlink()
    again._checkpoint_due -= trial_runner.FIRST_STATE_SECONDS
    again.checkpoint()
    assert (tmp_path / trial_files.STATE_FILE).exists()
    abandon(again)


def test_a_new_experiment_does_not_begin_over_another(tmp_path: Path) -> None:
    run_to_the_end(runner_at(tmp_path))
    with pytest.raises(TuneError, match="holds an experiment already"):
        runner_at(tmp_path, resume=False)


def test_an_experiment_that_has_ended_stays_ended_and_its_errors_run_again_only_on_request(tmp_path: Path) -> None:
    run_to_the_end(runner_at(tmp_path))
    executor = ScriptedExecutor()
    again = run_to_the_end(runner_at(tmp_path, resume=True, executor=executor))
    assert executor.started == []
    assert again["t4"].status == "ERROR"
    executor = ScriptedExecutor()
    runner = runner_at(tmp_path, resume="ERRORED_ONLY", executor=executor)
    for trial in runner.get_trials():
        if trial.trial_id == "t4":
            trial.config["script"] = [1]
    done = run_to_the_end(runner)
    assert {trial_id for trial_id, _, _ in executor.started} == {"t4"}
    assert (done["t4"].status, done["t4"].num_failures) == ("TERMINATED", 0)


def test_an_experiment_goes_on_from_its_remote_copy(tmp_path: Path) -> None:
    here, remote, there = tmp_path / "here", tmp_path / "remote", tmp_path / "there"
    runner = runner_at(here, remote_checkpoint_dir=str(remote))
    for _ in range(14):
        runner.step()
    runner.close()
    assert not (remote / "experiment.lock").exists()
    here.rename(tmp_path / "lost")
    there.mkdir()
    listener = Listener()
    resumed = TrialRunner(
        ScriptedTrials(here, SCRIPTS, max_failures=2, checkpoint_freq=1, keep_checkpoints_num=1),
        local_checkpoint_dir=here,
        remote_checkpoint_dir=str(remote),
        trial_executor=ScriptedExecutor(),
        resume="REMOTE",
        callbacks=with_default_loggers([listener]),
        metric="value",
    )
    run_to_the_end(resumed)
    check_whole(resumed)


def test_prompt_needs_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_to_the_end(runner_at(tmp_path, resume="PROMPT"))
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115 - closed by the test's end below
    try:
        with pytest.raises(TuneError, match="no terminal"):
            runner_at(tmp_path, resume="PROMPT")
    finally:
        import sys

        sys.stdin.close()


def test_a_step_that_fails_leaves_the_journal_to_the_next_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_at(tmp_path)
    for _ in range(8):
        runner.step()
    with monkeypatch.context() as patch:
        patch.setattr(FileJournal, "append", _disk_is_full)
        with pytest.raises(OSError, match="no space"):
            _step(runner, 20)
    runner.close()
    runner.close()  # once more does nothing
    runner = runner_at(tmp_path)
    run_to_the_end(runner)
    check_whole(runner)


def _step(runner: TrialRunner, times: int) -> None:
    for _ in range(times):
        runner.step()


def _disk_is_full(journal: FileJournal, records: object) -> None:
    raise OSError("no space left on device")
