"""A guest's files may hold anything: whoever looks at them goes on, and never waits."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from counterpoint.cli.display.plot import plot
from counterpoint.cli.display.progress import LiveProgress, describe_step
from counterpoint.cli.display.status_tables import status_parts
from counterpoint.cli.display.summary_tables import print_summary
from counterpoint.cli.stop import main as stop
from counterpoint.job.admin.stop_run import GRACE_SECONDS, stop_timeout
from counterpoint.job.directory import orchestrator_of, run_ids_in, steps_of, written_config
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.run_state import exclusion_of
from counterpoint.job.reading.status import read_status
from counterpoint.job.reading.summary import summarize, summarize_runs
from counterpoint.run.loop_health.slow_spots import METRIC
from counterpoint.run.trained import LARGEST_STEP
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.appended_lines import LONGEST_LINE
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.process.child import last_lines
from tests.support.jobs import shipped_line

NAMES = st.sampled_from(
    [
        *shipped_line(1, 1.0),
        "uptime_seconds",
        "phase/merge",
        METRIC,
        "run_id",
        "mismatch_kl",
        "discarded",
        "reason",
        "notable",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SLOW_SPOTS = st.fixed_dictionaries(
    dict.fromkeys(
        ("kind", "function", "file", "line", "inside", "callback", "thread", "seconds", "worst", "count"),
        VALUES | st.just("gil"),
    )
)
LINES = st.builds(
    lambda changed, step, time, blame: {**shipped_line(step, time), METRIC: blame} | changed,
    st.dictionaries(NAMES, VALUES, max_size=4),
    st.integers(0, 9),
    st.floats(0, 1e10),
    st.lists(SLOW_SPOTS, max_size=2),
)


def show(output: Path) -> None:
    """Everything that shows a run, without a terminal."""
    console = Console(file=io.StringIO(), width=200)
    history = History.of(output, "guest", 9)
    for line in history.refresh():
        describe_step(line, history)
    for summary in (
        summarize(history, output, 1.0, "done"),
        summarize_runs([history, history], {}, output, 1.0, "done"),
    ):
        json.dumps(summary)
        print_summary(summary, {}, console)
    for part in status_parts(read_status(output)):
        console.print(part)
    json.dumps(read_status(output).as_json())
    progress = LiveProgress(console, {"guest": history, "another": history})
    progress.update([], [])
    progress.close()


@pytest.mark.slow
@given(st.lists(LINES, max_size=4), st.dictionaries(NAMES, VALUES))
def test_whatever_a_guest_writes_into_its_metrics_it_can_be_shown(
    lines: list[dict[str, Any]], discarded: dict[str, Any]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory) / "run_guest"
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        (run_dir / "discarded.json").write_bytes(orjson.dumps({"step": 1, "discarded": 1, "reason": "x"} | discarded))
        show(Path(directory))


@pytest.mark.slow
def test_curves_are_drawn_of_whatever_numbers_there_are(tmp_path: Path) -> None:
    (tmp_path / "run_guest").mkdir()
    lines = [
        shipped_line(step, 1.0) | {"reward/mean": value} for step, value in ((1, 9e17), (2, -9e17), (10**17, None))
    ]
    (tmp_path / "run_guest" / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    history = History.of(tmp_path, "guest")
    history.refresh()
    assert plot([history], tmp_path / "curves.png", "x").exists()


@pytest.mark.parametrize(
    "line", [b"null", b"[]", b'"x"', b"[" * 100_000, b"\xff", b'{"step": "1", "time": 1}', b'{"step": true}']
)
def test_what_is_no_step_is_passed_over(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "run_guest").mkdir()
    good = orjson.dumps(shipped_line(2, 1.0))
    (tmp_path / "run_guest" / "metrics.jsonl").write_bytes(line + b"\n" + good + b"\n")
    history = History.of(tmp_path, "guest")
    assert [line["step"] for line in history.refresh()] == [2]


@pytest.mark.slow
def test_a_line_without_an_end_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "run_guest").mkdir()
    metrics = tmp_path / "run_guest" / "metrics.jsonl"
    history = History.of(tmp_path, "guest")
    metrics.write_bytes(b"x" * (2 * LONGEST_LINE))
    assert history.refresh() == []
    with metrics.open("ab") as file:
        file.write(b"\n" + orjson.dumps(shipped_line(2, 1.0)) + b"\n")
    assert [line["step"] for line in history.refresh()] == [2]


@pytest.mark.parametrize(
    "hostile",
    [
        None,
        b"a = " + b"[" * 100_000,
        b"steps = inf\nshutdown_timeout_seconds = inf",
        b"steps = " + b"9" * 400,
        b"steps = -1",
        f"steps = {LARGEST_STEP + 1}".encode(),
    ],
)
def test_what_is_no_configuration_says_nothing(tmp_path: Path, hostile: bytes | None) -> None:
    """None: a FIFO stands in its place, which whoever opens it waits for."""
    control = tmp_path / "run_guest" / "control"
    control.mkdir(parents=True)
    names = (
        "control/orch.toml",
        "control/evicted.txt",
        "metrics.jsonl",
        "discarded.json",
        "orchestrator.lock",
        "orchestrator.log",
    )
    for name in names:
        path = tmp_path / "run_guest" / name
        os.mkfifo(path) if hostile is None else path.write_bytes(hostile)
    assert steps_of(tmp_path, "guest") is None
    assert written_config(tmp_path, "guest").keys() <= {"steps", "shutdown_timeout_seconds"}
    assert 0 < stop_timeout(tmp_path, "guest") - GRACE_SECONDS < 86400
    assert orchestrator_of(tmp_path, "guest") is None
    assert (exclusion_of(tmp_path / "run_guest") or "").startswith("evicted: ")
    assert (last_lines(tmp_path / "run_guest" / "orchestrator.log") == []) == (hostile is None)
    show(tmp_path)


def test_a_run_whose_metrics_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "run_guest").mkdir()
    os.mkfifo(tmp_path / "run_guest" / "metrics.jsonl")
    history = History.of(tmp_path, "guest")
    assert history.refresh() == []
    assert history.unreadable == f"{tmp_path}/run_guest/metrics.jsonl is a FIFO; expected a regular file"
    console = Console(file=io.StringIO(), width=200)
    for part in status_parts(read_status(tmp_path)):
        console.print(part)
    assert "is a FIFO" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_directory_that_is_no_runs_is_none(tmp_path: Path) -> None:
    for name in ("run_guest", "run_[", "run_a b", "run_[bold]"):
        (tmp_path / name).mkdir()
    assert run_ids_in(tmp_path) == ["guest"]


def test_stop_signals_no_process_that_does_not_hold_the_runs_lock(tmp_path: Path) -> None:
    """A guest writes into its lock what it likes, such as a process of ours."""
    lock_file = tmp_path / "run_guest" / "orchestrator.lock"
    lock = take_lock(lock_file, "taken")
    with subprocess.Popen(["sleep", "600"]) as ours:
        lock_file.write_text(f"{ours.pid} {socket.gethostname()}\n")
        with pytest.raises(UserError, match=f"names process {ours.pid}, which does not hold it"):
            stop(["guest", "--job", str(tmp_path)])
        assert ours.poll() is None
        ours.kill()
    os.close(lock)
