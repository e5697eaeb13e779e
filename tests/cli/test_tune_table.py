"""The table of an experiment's trials, live and as lines."""

from __future__ import annotations

import io

from rich.console import Console

from counterpoint.cli.display.tune_table import LiveTable, TrialRow, best_of, table_of
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.trial import Trial


def shown(rows: list[TrialRow]) -> str:
    console = Console(file=io.StringIO(), width=140, markup=False)
    console.print(table_of(rows, "exp", "reward/mean", "max"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(trial_id: str, reward: float | None, status: str = "RUNNING", **more: str) -> TrialRow:
    result = {} if reward is None else {"reward/mean": reward, "training_iteration": 3, "time_total_s": 61.0}
    return TrialRow(trial_id, status, {"training/learning_rate": 0.00123456}, result, **more)  # type: ignore[arg-type]


def test_the_table_names_the_best_and_the_errors() -> None:
    rows = [row("a", 0.25), row("b", 0.75, copies="a"), row("c", None, "ERROR", error="it died [/now]\nat once")]
    text = shown(rows)
    for part in ("3 trials, 1 ERROR, 2 RUNNING", "learning_rate", "0.001235", "1 min 01 s", "0.750"):
        assert part in text
    assert "best: b: reward/mean 0.750 after 3; training.learning_rate = 0.001235" in text
    assert "c: it died [/now]" in text
    assert "at once" not in text
    assert best_of(rows, "reward/mean", "min") == rows[0]
    assert best_of(rows, "nothing", "min") is None


def test_many_trials_are_cut() -> None:
    text = shown([row(f"t{number}", 0.5, "TERMINATED") for number in range(50)] + [row("last", 0.1)])
    assert "... and 11 more" in text
    assert "last" in text
    assert "t0 " not in text


def trials() -> list[Trial]:
    loser = Trial("run", {"x": 1.0}, "loser", evaluated_params={"x": 1.0}, status="RUNNING")
    loser.checkpoint = Checkpoint("winner", 4, "somewhere")
    loser.last_result = {"reward/mean": 0.5, "training_iteration": 4}
    return [loser]


def test_lines_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    table = LiveTable(Console(file=file, width=140, markup=False), "exp", "reward/mean", "max")
    one = trials()
    table.setup()
    table.on_trial_restore(0, one, one[0])
    assert not file.getvalue(), "a resume repeats what has happened"
    table.on_step_begin(0, one)
    table.on_trial_start(0, one, one[0])
    table.on_trial_restore(0, one, one[0])
    table.on_step_end(1, one)
    one[0].error_msg = "killed\nby SIGKILL"
    table.on_trial_recover(1, one, one[0])
    table.on_trial_fail(1, one, one[0])
    table.on_trial_complete(1, one, one[0])
    table.on_experiment_end(one)
    text = file.getvalue()
    for part in ("loser runs: x = 1", "loser goes on from winner after 4", "started again: killed", "is done"):
        assert part in text


def test_a_terminal_gets_a_live_table() -> None:
    file = io.StringIO()
    console = Console(file=file, width=140, markup=False, force_terminal=True)
    table = LiveTable(console, "exp", "reward/mean", "max", lambda: "1/2 slots")
    table.setup()
    table._shown_at = 0.0
    table.on_step_end(1, trials())
    table.on_trial_start(1, trials(), trials()[0])
    table.close()
    table.close()
    assert "1/2 slots" in file.getvalue()
