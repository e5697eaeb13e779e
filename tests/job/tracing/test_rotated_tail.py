"""Following a bounded file across its rotations: each line once, and what was lost is known."""

from __future__ import annotations

from pathlib import Path

from job.tracing.rotated_tail import RotatedTail
from transport.files.place import Place
from transport.files.rotated_lines import RotatedLines


def read(tail: RotatedTail) -> list[bytes]:
    """All that there is now."""
    lines: list[bytes] = []
    while more := tail.read():
        lines += [line.text for line in more]
    return lines


def test_each_line_is_read_once_across_rotations_and_restarts(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    writer = RotatedLines(path, "lines", 100)
    tail = RotatedTail(path)
    assert read(tail) == []
    seen: list[bytes] = []
    for number in range(30):
        writer.append([{"n": number}])
        if number % 3 == 0:
            seen += read(tail)
            tail = RotatedTail(path, Place.restored(tail.place.saved()))
    seen += read(tail)
    assert seen == [b'{"n":%d}' % number for number in range(30)]
    assert tail.lost == 0


def test_two_rotations_between_two_reads_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    writer = RotatedLines(path, "lines", 20)
    tail = RotatedTail(path)
    writer.append([{"n": 0}])
    assert read(tail) == [b'{"n":0}']
    for number in range(1, 10):
        writer.append([{"n": number}])
    assert read(tail)[-1] == b'{"n":9}'
    assert tail.lost == 1
