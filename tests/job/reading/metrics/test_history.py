"""A run's history, read from metrics files that grow, are replaced, or are damaged."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint.job.reading.metrics import history as history_module
from counterpoint.job.reading.metrics import metrics_lines, newest_steps, step_table, trained_lines
from counterpoint.job.reading.metrics.history import History
from counterpoint.job.reading.metrics.metrics_lines import step_of
from counterpoint.job.reading.metrics.newest_steps import TrainedEnd
from counterpoint.job.reading.metrics.step_table import StepTable
from counterpoint.job.reading.metrics.trained_lines import TrainedLines
from counterpoint.transport.files import appended_lines
from counterpoint.transport.files.appended_lines import AppendedLines
from counterpoint.transport.files.untrusted import parse_json
from tests.support.jobs import shipped_line, trained_line, write_lines
from tests.support.past_jobs import history_of


def test_history_follows_files_that_grow_and_are_replaced(tmp_path: Path) -> None:
    history = History.of(tmp_path, "test")
    assert history.refresh() == []
    path = tmp_path / "run_test" / "metrics.jsonl"
    write_lines(path, [shipped_line(1, 1.0), shipped_line(2, 2.0)])
    assert [line["step"] for line in history.refresh()] == [1, 2]
    with path.open("a") as file:
        file.write('{"step": 3, "ti')
    assert history.refresh() == []
    with path.open("a") as file:
        file.write('me": 3.0}\n')
    assert [line["step"] for line in history.refresh()] == [3]
    replacement = path.with_suffix(".new")
    write_lines(replacement, [shipped_line(step, float(step)) for step in range(1, 5)])
    replacement.replace(path)
    assert [line["step"] for line in history.refresh()] == [4]


def test_the_progress_of_a_run_without_an_orchestrator_is_what_is_trained(tmp_path: Path) -> None:
    write_lines(tmp_path / "trainer" / "metrics.jsonl", [trained_line(step, run_id="sft") for step in (1, 2)])
    history = History.of(tmp_path, "sft", 6)
    history.refresh()
    assert (history.progress, history.step) == ("2/6", 0)
    write_lines(tmp_path / "run_sft" / "metrics.jsonl", [shipped_line(3, 1.0)])
    history.refresh()
    assert history.progress == "3/6"


def test_lines_too_short_for_a_step_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shortest = b'{"step":1,"time":1}'
    (tmp_path / "run_test").mkdir()
    (tmp_path / "run_test" / "metrics.jsonl").write_bytes(b"\n" * 1000 + b"{}\n" * 1000 + shortest + b"\n")
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "metrics.jsonl").write_bytes(b"\n" * 1000)
    parsed: list[bytes] = []

    def parse(text: bytes) -> dict[str, Any]:
        parsed.append(text)
        return parse_json(text)

    for module in (metrics_lines, step_table, newest_steps):
        monkeypatch.setattr(module, "object_in", parse)
    assert [line["step"] for line in History.of(tmp_path, "test").refresh()] == [1]
    assert parsed == [shortest]
    TrainedEnd(tmp_path / "trainer", 1).refresh()
    for short in (b"", b"{}"):
        StepTable("test", []).add(short, 0)
    assert parsed == [shortest]


def test_what_a_machines_end_left_is_passed_over(past: Path) -> None:
    path = past / "run_test" / "metrics.jsonl"
    path.write_bytes(
        path.read_bytes() + b'\0\0\0\n[1]\n{"step": 21}\n' + json.dumps(shipped_line(21, 150.0)).encode() + b"\n"
    )
    (past / "run_test" / "discarded.json").write_bytes(b"\0\0")
    history = history_of(past)
    assert (history.step, len(history.shipped), history.discarded) == (21, 21, {})


def test_steps_that_a_resume_takes_back_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "trainer" / "metrics.jsonl"
    write_lines(path, [trained_line(step) for step in range(1, 5)])
    history = history_of(tmp_path)
    assert history.last_trained["step"] == 4
    rewound = path.with_suffix(".new")
    write_lines(rewound, [trained_line(step) for step in range(1, 3)])
    rewound.replace(path)
    history.refresh()
    assert sorted(history.trained) == [1, 2]


def test_steps_that_a_resume_rewrites_in_place_are_read_again(tmp_path: Path) -> None:
    """The repaired file has grown beyond our place before we look again."""
    path = tmp_path / "run_test" / "metrics.jsonl"
    write_lines(path, [shipped_line(step, float(step)) for step in range(1, 4)])
    history = history_of(tmp_path)
    with path.open("r+") as file:
        file.truncate(0)
    with path.open("a") as file:
        file.writelines(json.dumps(shipped_line(step, 100.0 + step)) + "\n" for step in range(1, 7))
    assert [line["step"] for line in history.refresh()] == [4, 5, 6]
    assert [line["time"] for line in history.shipped.values()] == [100.0 + step for step in range(1, 7)]


def test_another_runs_training_is_not_ours(past: Path) -> None:
    history = history_of(past)
    assert len(history.trained) == 19
    assert history.trained[5]["mismatch_kl"] == pytest.approx(5e-6)


def test_a_resumed_jobs_rate_leaves_out_the_pause(tmp_path: Path) -> None:
    lines = [shipped_line(1, 100.0), shipped_line(2, 102.0), shipped_line(3, 9000.0), shipped_line(4, 9001.0)]
    write_lines(tmp_path / "run_test" / "metrics.jsonl", lines)
    history = History.of(tmp_path, "test", since=8000.0)
    history.refresh()
    assert history.tokens_per_second() == pytest.approx(1000)


def test_what_a_killed_process_left_is_no_news_of_the_one_that_resumes(tmp_path: Path) -> None:
    run_dir = tmp_path / "run_test"
    write_lines(run_dir / "metrics.jsonl", [shipped_line(1, 100.0)])

    def leave(at: float) -> None:
        report = {"step": 1, "time": at, "discarded": 64, "reason": "filtered", "failure": "", "notable": True}
        (run_dir / "discarded.json").write_text(json.dumps(report))
        notice = {"groups": 8, "reason": "each has the reward 0", "advice": "take easier examples", "since": at}
        (run_dir / "no_difference.json").write_text(json.dumps(notice))

    history, resumed = History.of(tmp_path, "test"), History.of(tmp_path, "test", since=8000.0)
    for at, is_news in ((110.0, False), (8001.0, True)):
        leave(at)
        history.refresh()
        resumed.refresh()
        assert (history.discarded["discarded"], history.no_difference is not None) == (64, True)
        assert (bool(resumed.discarded), resumed.no_difference is not None) == (is_news, is_news)


def test_a_clock_that_is_set_back_makes_no_duration_negative(tmp_path: Path) -> None:
    times = {1: (1000.0, 5.0), 2: (1010.0, 15.0), 3: (900.0, 25.0), 4: (910.0, 35.0), 5: (20.0, 3.0)}
    lines = [shipped_line(step, at) | {"uptime_seconds": uptime} for step, (at, uptime) in times.items()]
    write_lines(tmp_path / "run_test" / "metrics.jsonl", lines)
    history = history_of(tmp_path)
    assert [history.seconds_of(step) for step in range(1, 6)] == [5.0, 10.0, 10.0, 10.0, 3.0]
    rate = history.tokens_per_second()
    assert rate is not None
    assert rate > 0


def test_pauses_between_sessions_are_left_out_and_a_sessions_first_step_counts(tmp_path: Path) -> None:
    """Each of these steps took 2 s, the first of a session too, which knows since when it has been generating."""
    times = [(100.0, 2.0), (102.0, 4.0), (9000.0, 2.0), (9002.0, 4.0)]
    lines = [shipped_line(step, time, uptime_seconds=uptime) for step, (time, uptime) in enumerate(times, 1)]
    write_lines(tmp_path / "run_test" / "metrics.jsonl", lines)
    history = history_of(tmp_path)
    assert history.tokens_per_second() == pytest.approx(500)
    history.since = 8990.0
    assert history.tokens_per_second() == pytest.approx(500)


def test_what_was_generated_before_a_resume_does_not_count_for_the_rate(tmp_path: Path) -> None:
    lines = [shipped_line(1, 100.0, uptime_seconds=2.0), shipped_line(2, 9000.0, uptime_seconds=1.0)]
    lines[1] |= {"tokens/completion": 1000, "tokens/restored": 900}
    write_lines(tmp_path / "run_test" / "metrics.jsonl", lines)
    history = History.of(tmp_path, "test", since=8990.0)
    history.refresh()
    assert history.tokens_per_second() == pytest.approx(100)


def test_lines_of_other_runs_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred runs share a trainer, and its file."""
    write_lines(
        tmp_path / "trainer" / "metrics.jsonl",
        [trained_line(step, run) for step in range(1, 4) for run in ("test", "another")],
    )
    parsed: list[bytes] = []

    def noted(line: bytes) -> dict[str, Any]:
        parsed.append(line)
        return step_of(line)

    for module in (history_module, trained_lines):
        monkeypatch.setattr(module, "step_of", noted)
    history = History.of(tmp_path, "test")
    history.refresh()
    assert sorted(history.trained) == [1, 2, 3]
    assert len(parsed) == 3


def test_a_run_whose_own_file_is_longer_than_one_look_says_how_far_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appended_lines, "MOST_BYTES", 5000)
    monkeypatch.setattr(appended_lines, "BLOCK_BYTES", 1000)
    path = tmp_path / "run_test" / "metrics.jsonl"
    write_lines(path, [shipped_line(step, float(step)) for step in range(1, 31)])
    history = history_of(tmp_path)
    assert 0 < history.step < 30
    assert history.unreadable == f"{path}: only its first 0.0 GB have been read"
    while history.unreadable:
        history.refresh()
    assert history.step == 30


def test_a_long_run_is_kept_in_bounded_memory_and_its_sums_are_those_of_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "KEPT_STEPS", 10)
    path = tmp_path / "run_test" / "metrics.jsonl"
    whole = [shipped_line(step, 2.0 * step) | {"staleness/max": 90 if step == 3 else 1} for step in range(1, 301)]
    write_lines(path, whole)
    write_lines(tmp_path / "trainer" / "metrics.jsonl", [trained_line(step) for step in range(1, 301)])
    history = history_of(tmp_path)
    for kept in (history.shipped, history.trained):
        assert len(kept) <= 30
        assert (min(kept), max(kept)) == (1, 300)
        assert set(range(291, 301)) <= kept.keys(), "the newest are all there"
    summed = sum(line.get("tokens/completion", 0) for line in history.counted)
    assert summed == sum(line["tokens/completion"] for line in whole)
    assert history.left_out.maxima["staleness/max"] == 90
    assert history.tokens_per_second() == pytest.approx(_rate(whole))
    assert history.counted_from == 1
    append = [shipped_line(301, 602.0)]
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in append)
    assert [line["step"] for line in history.refresh()] == [301], "no step is told twice"


def _rate(lines: list[dict[str, Any]]) -> float:
    history = History("test", shipped={line["step"]: line for line in lines})
    rate = history.tokens_per_second()
    assert rate is not None
    return rate


def test_of_a_very_long_file_the_newest_steps_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million lines do not hold up `status`, and the step is the newest one, not that at which a limit was met."""
    monkeypatch.setattr(history_module, "NEWEST_BYTES", 20_000)
    monkeypatch.setattr(history_module, "NEWEST_TRAINED", 40)
    path = tmp_path / "run_test" / "metrics.jsonl"
    write_lines(path, [shipped_line(step, float(step)) for step in range(1, 1001)])
    write_lines(tmp_path / "trainer" / "metrics.jsonl", [trained_line(step) for step in range(1, 1001)])
    history = history_of(tmp_path)
    assert (history.step, history.last_trained["step"], history.unreadable) == (1000, 1000, "")
    assert 1 < history.counted_from == min(history.shipped) < 1000
    assert sorted(history.trained) == list(range(961, 1001))


def test_a_look_keeps_of_many_lines_only_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended_lines, "BLOCK_BYTES", 4096)
    (tmp_path / "run_test").mkdir()
    (tmp_path / "run_test" / "metrics.jsonl").write_bytes(b'{"step":1,"time":1}\n' * 10_000)
    history = History.of(tmp_path, "test")
    tracemalloc.start()
    fresh = history.refresh()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [line["step"] for line in fresh] == [1]
    assert peak < 2**19


def test_a_look_that_ends_at_its_deadline_is_continued_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appended_lines, "BLOCK_BYTES", 1000)
    path = tmp_path / "run_test" / "metrics.jsonl"
    history = History.of(tmp_path, "test")
    for last in (30, 40):  # then a resume has replaced the file
        replacement = path.with_suffix(".new")
        write_lines(replacement, [shipped_line(step, float(step)) for step in range(1, last + 1)])
        replacement.replace(path)
        looks = [history.refresh(deadline=0.0)]
        assert history.is_behind
        assert 0 < history.step < last
        while history.is_behind:
            looks.append(history.refresh(deadline=0.0))
        assert [line["step"] for look in looks for line in look] == list(
            range(last - 29 if last == 30 else 31, last + 1)
        )
        assert (sorted(history.shipped), history.unreadable) == (list(range(1, last + 1)), "")


def test_the_lines_of_a_trainer_whose_file_was_removed_are_none(tmp_path: Path) -> None:
    path = tmp_path / "trainer" / "metrics.jsonl"
    write_lines(path, [trained_line(1, "a"), trained_line(1, "b")])
    shared = TrainedLines(tmp_path)
    first, later = (History.of(tmp_path, run, trained=shared) for run in ("a", "b"))
    first.refresh()
    path.unlink()
    for history in (first, later):
        history.refresh()
        assert not history.unreadable
    assert (len(first.trained), len(later.trained)) == (1, 0)


def test_the_histories_of_a_job_share_one_pass_over_a_file_of_many_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer of a hundred runs writes more than is read in one look; what is trained must not seem less for it."""
    monkeypatch.setattr(appended_lines, "MOST_BYTES", 1000)
    monkeypatch.setattr(appended_lines, "BLOCK_BYTES", 300)
    path = tmp_path / "trainer" / "metrics.jsonl"
    write_lines(path, [trained_line(step, run) for step in range(1, 41) for run in ("a", "b")])
    assert path.stat().st_size > 5000
    blocks: list[int] = []
    given = AppendedLines.new_blocks

    def counted(lines: AppendedLines, restart: Callable[[], None]) -> Iterator[tuple[int, bytes]]:
        for offset, block in given(lines, restart):
            blocks.append(len(block))
            yield offset, block

    monkeypatch.setattr(AppendedLines, "new_blocks", counted)
    shared = TrainedLines(tmp_path)
    histories = [History.of(tmp_path, run, 40, trained=shared) for run in ("a", "b", "late")]
    for history in histories:
        history.refresh()
    assert [max(history.trained, default=0) for history in histories] == [40, 40, 0]
    assert sum(blocks) == path.stat().st_size, "each byte once"
    write_lines(path, [trained_line(41, "b"), trained_line(1, "late")])
    for history in histories:
        history.refresh()
    assert [max(history.trained, default=0) for history in histories] == [40, 41, 1]
