"""Metrics: one line a step whatever was killed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.orchestrator.metrics import log_step, repair
from counterpoint.transport.files import json_lines
from counterpoint.transport.files.json_lines import append_line


def steps_in(path: Path) -> list[int]:
    return [orjson.loads(line)["step"] for line in path.read_bytes().splitlines()]


def test_repair_leaves_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2, 4, 4, 5):
        append_line(path, {"step": step})
    path.write_bytes(path.read_bytes() + b'{"step": 6, "rew')
    repair(path, 4, [{"step": 3, "restored": True}, {"step": 4, "restored": True}])
    assert steps_in(path) == [1, 2, 3, 4]
    left = [orjson.loads(line) for line in path.read_bytes().splitlines()]
    assert [line.get("restored", False) for line in left] == [False, False, True, False]


def test_repair_does_not_touch_what_agrees(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 1})
    before = path.stat().st_mtime_ns
    repair(path, 1, [{"step": 1}])
    assert path.stat().st_mtime_ns == before


def test_repair_reads_no_further_back_than_the_commits_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(orjson.dumps({"step": step, "pad": "x" * 200}) + b"\n" for step in range(1, 5001)))
    before = path.read_bytes()
    path.write_bytes(before + b'{"step": 5001}\n{"st')
    read = 0
    pread = os.pread

    def counted(descriptor: int, length: int, offset: int) -> bytes:
        nonlocal read
        read += length
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", counted)
    repair(path, 5000, [{"step": 4999}, {"step": 5000}])
    assert path.read_bytes() == before
    assert read <= 2 * 2**16 < len(before) / 5


@given(
    steps=st.lists(st.integers(1, 8), max_size=12),
    torn=st.sampled_from([b"", b'{"step": 7', b"\n", b"[1]\n"]),
    newest=st.integers(0, 8),
    kept=st.integers(1, 3),
    block=st.sampled_from([1, 7, 64]),
)
def test_repair_leaves_the_committed_steps_once_at_the_end(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int], torn: bytes, newest: int, kept: int, block: int
) -> None:
    """Whatever comes after the lines that are older than the commits."""
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    first = max(1, newest - kept + 1)
    old = [{"step": step} for step in range(1, first)]
    written = [*old, *({"step": step, "written": True} for step in steps if step >= first)]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in written) + torn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_lines, "_BLOCK_BYTES", block)
        repair(path, newest, [{"step": step} for step in range(first, newest + 1)])
        left = [line for _, line in json_lines.read_lines(path)]
        again = path.read_bytes()
        repair(path, newest, [{"step": step} for step in range(first, newest + 1)])
    assert [line["step"] for line in left] == list(range(1, newest + 1))
    for line in left[first - 1 :]:
        assert line.get("written", False) == (line["step"] in steps)
    assert path.read_bytes() == again


def test_repair_of_a_run_that_never_committed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    repair(path, 0, [])
    assert not path.exists()


def test_repair_says_what_is_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, {"step": 3})
    repair(path, 3, [])
    assert "[1, 2]" in caplog.text


def test_a_step_is_one_line_with_the_slowest_phase_first(caplog: pytest.LogCaptureFixture) -> None:
    line = {
        "step": 3, "reward/mean": 0.5, "staleness/mean": 1.0, "rollouts/completed": 8, "rollouts/failed": 0,
        "rollouts/filtered": 2, "rollouts/cancelled": 0, "policy/version": 2, "event_loop_lag/p99": 0.001,
        "event_loop_lag/max": 0.002, "phase/merge": 0.001, "phase/commit": 0.02, "phase/send": 0.0005,
    }  # fmt: skip
    with caplog.at_level(logging.INFO):
        log_step(line, 10)
    assert len(caplog.records) == 1
    text = caplog.records[0].getMessage()
    assert text.startswith("step 3/10  ")
    assert text.endswith("phase breakdown: commit=0.0200, merge=0.0010, send=0.0005")
