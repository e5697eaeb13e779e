"""Reading the trainer's beacon on a network file system."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from counterpoint.transport.wires import filesystem
from counterpoint.transport.wires.filesystem import _read_beacon


def test_a_beacon_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beacon = tmp_path / "trainer.json"
    beacon.write_text('{"session": "0123456789abcdef", "beat": 3}')
    reads = 0

    def stale_at_first(path: Path) -> bytes:
        nonlocal reads
        reads += 1
        if reads == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return path.read_bytes()

    monkeypatch.setattr(filesystem, "_beginning", stale_at_first)
    assert _read_beacon(beacon) == ("0123456789abcdef", 3)
    assert reads == 2
