"""`transport.files.checked_entries`: what a killed writer leaves is told from damage, at every bit and every length."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.files.checked_entries import DamagedEntry, head_of, read_entries

BODIES = [b"one", b"", b"\0" * 20, b"four" * 5]
WHOLE = b"".join(part for body in BODIES for part in (head_of([body[:2], body[2:]]), body))


def bodies(content: bytes) -> list[bytes]:
    return [bytes(body) for body, _ in read_entries(content)]


def test_entries_are_read_as_written_with_their_ends() -> None:
    assert bodies(WHOLE) == BODIES
    assert [end for _, end in read_entries(WHOLE)][-1] == len(WHOLE)
    assert bodies(b"") == []


def test_any_flipped_bit_is_damage() -> None:
    for bit in range(8 * len(WHOLE)):
        damaged = bytearray(WHOLE)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedEntry):
            bodies(bytes(damaged))


@given(kept=st.integers(0, len(WHOLE)), zeros=st.integers(0, 100))
def test_an_end_that_was_cut_off_is_none(kept: int, zeros: int) -> None:
    ends = [end for _, end in read_entries(WHOLE)]
    assert bodies(WHOLE[:kept]) == BODIES[: sum(end <= kept for end in ends)]
    assert bodies(WHOLE + bytes(zeros)) == BODIES
