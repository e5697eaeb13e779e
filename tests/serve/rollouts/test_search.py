"""Search: what it finds, that it goes on where its time ended, and that no content keeps it from what follows."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.job.reading.rollouts import line_index
from counterpoint.job.reading.rollouts import search as searching
from counterpoint.job.reading.rollouts.search import SearchHit, search
from counterpoint.job.reading.rollouts.selection import RowFilter
from counterpoint.job.reading.rollouts.step_indexes import moment
from tests.serve.rollouts.jobs import write_lines


def found(job: Path, text: str, steps: tuple[int, ...] = (3, 2, 1), wanted: RowFilter | None = None) -> list[SearchHit]:
    searched = search(job, "one", steps, text, (wanted or RowFilter()).takes_record, 100, moment(60))
    assert searched.go_on is None
    return searched.hits


def test_texts_of_turns_and_errors_are_found_in_any_letter_case(job: Path) -> None:
    (hit,) = found(job, "TWO words")
    assert (hit.rollout.step, hit.rollout.number, hit.turn, hit.part, hit.found) == (3, 1, 1, "completion", "two words")
    assert hit.after == "</s>"
    (hit,) = found(job, "☂")
    assert (hit.rollout.number, hit.turn, hit.part) == (0, 0, "completion")
    assert [(each.rollout.step, each.rollout.number) for each in found(job, "attempt")] == [(3, 4), (2, 0), (1, 0)]
    assert [each.part for each in found(job, "valueerror: <script>")] == ["error"]
    assert {each.part for each in found(job, "question 7")} == {"prompt"}
    assert found(job, "reward") == [], "the names of fields are no text"
    assert found(job, "attempt", (2,))[0].rollout.step == 2
    assert [each.rollout.step for each in found(job, "attempt", wanted=RowFilter(least_reward=0.15))] == [3, 2]


def test_what_was_found_is_safe_to_be_shown(job: Path) -> None:
    (hit,) = found(job, "evil")
    assert "\u202e" not in hit.before + hit.found + hit.after
    assert "\\u202e" in hit.before


def test_a_search_goes_on_where_its_time_ended(job: Path) -> None:
    hits: list[SearchHit] = []
    place, calls = None, 0
    while True:
        part = search(job, "one", (3, 2, 1), "a", RowFilter().takes_record, 1, moment(-1), place)
        hits += part.hits
        calls += 1
        assert part.searched == 1, "one line in any case, and no more when the time is over"
        if (place := part.go_on) is None or calls > 20:
            break
        if place.startswith("1-1-"):
            assert search(job, "one", (3, 2, 1), "a", RowFilter().takes_record, 1, moment(60), place).searched == 0
            break
    assert hits == found(job, "a")


@pytest.mark.slow
@settings(max_examples=60)
@given(text=st.text(min_size=1, max_size=6), around=st.tuples(st.text(max_size=5), st.text(max_size=5)))
def test_whatever_is_written_is_found(
    tmp_path_factory: pytest.TempPathFactory, text: str, around: tuple[str, str]
) -> None:
    """Quotes, backslashes and control characters are written in another way than they are meant."""
    path = tmp_path_factory.getbasetemp() / "run_one" / "rollouts" / "step_1" / "rollouts.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"turns": [{"completion": f"{around[0]}{text}{around[1]}"}]}
    path.write_bytes(orjson.dumps(record) + b"\n")
    (hit,) = found(tmp_path_factory.getbasetemp(), text, (1,))
    assert hit.part == "completion"


def test_lines_that_are_damaged_or_too_long_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "MAX_LINE_BYTES", 500)
    monkeypatch.setattr(searching, "_PIECE_BYTES", 100)
    good = orjson.dumps({"turns": [{"completion": "needle"}]})
    lines = [b'{"broken needle', b"\xff needle \xfe", good[:-2] + b" " * 3000 + good[-2:], b"[1]", good]
    write_lines(tmp_path, "one", 1, b"".join(line + b"\n" for line in lines))
    searched = search(tmp_path, "one", (2, 1), "needle", RowFilter().takes_record, 10, moment(60))
    assert [hit.rollout.number for hit in searched.hits] == [4]
    assert (searched.searched, searched.problems) == (5, 4), "three lines, and the file of step 2, which is missing"
    assert line_index.MAX_LINE_BYTES > 10 * 2**20
