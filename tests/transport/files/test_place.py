"""A place is found again in the file that was read, and in no other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.transport.files.place import BEGINNING, COMPARED_BYTES, Place

data = st.binary(max_size=3 * COMPARED_BYTES)


def is_in(place: Place, path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return place.is_in(descriptor)
    finally:
        os.close(descriptor)


@given(st.lists(data, max_size=5))
def test_a_place_is_the_same_in_whatever_pieces_it_was_read(pieces: list[bytes]) -> None:
    place = BEGINNING
    for piece in pieces:
        place = place.plus(piece)
    assert place == BEGINNING.plus(b"".join(pieces))
    assert Place.restored(orjson.loads(orjson.dumps(place.saved()))) == place


def test_a_file_that_was_written_anew_is_another_one_also_if_it_has_grown_past_the_place(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": %d, "time": %d}\n' % (step, 10**9 + step) for step in range(40)]
    path.write_bytes(b"".join(lines[:20]))
    with path.open("rb") as file:
        place = Place.at(file.fileno(), path.stat().st_size)
    assert place == BEGINNING.plus(b"".join(lines[:20]))
    path.write_bytes(b"".join(lines[:30]))
    assert is_in(place, path)
    path.rename(tmp_path / "rotated")
    assert is_in(place, tmp_path / "rotated")
    path.write_bytes(b"".join([*lines[:15], *lines[20:40]]))
    assert not is_in(place, path)
    path.write_bytes(b"".join(lines[:10]))
    assert not is_in(place, path)
    assert is_in(BEGINNING, path)


@pytest.mark.parametrize(
    "saved",
    [None, [], [7, 12], [5, "abc"], [3, "☂☂☂"], [-1, ""], ["3", "abc"], {"offset": 3}, [True, "a", 1], [1e9, ""]],
)
def test_what_was_saved_otherwise_is_the_beginning(saved: Any) -> None:
    assert Place.restored(saved) == BEGINNING
