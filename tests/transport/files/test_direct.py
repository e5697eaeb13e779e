"""Large files written past the page cache hold the same bytes as those written through it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from counterpoint.transport.files import direct
from counterpoint.transport.files.atomic import Buffer
from counterpoint.transport.files.direct import append, write_new_file

BLOCK = 4096


@pytest.fixture(autouse=True)
def small_areas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few blocks fill one, and are a large file."""
    monkeypatch.setattr(direct, "_DIRECT_FROM_BYTES", 4 * BLOCK)
    monkeypatch.setattr(direct, "_AREA_BYTES", 4 * BLOCK)


@pytest.mark.parametrize("size", [0, 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 12 * BLOCK, 13 * BLOCK + 5])
def test_a_file_holds_what_was_written_whatever_its_size(tmp_path: Path, size: int) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    buffers: list[Buffer] = [content[: size // 3], b"", content[size // 3 : size // 2], content[size // 2 :].tobytes()]
    write_new_file(tmp_path / "file", buffers)
    assert (tmp_path / "file").read_bytes() == content.tobytes()


def test_many_small_buffers_are_joined(tmp_path: Path) -> None:
    pieces = [bytes([number % 256]) * (number % 37) for number in range(5000)]
    write_new_file(tmp_path / "file", pieces)
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)


@pytest.mark.parametrize(
    "sizes",
    [(8, 16 * BLOCK, 16 * BLOCK, 3, 5), (5 * BLOCK, 4 * BLOCK + 1, 0, 9 * BLOCK), (BLOCK - 1, 1, 4 * BLOCK, 20_000)],
)
def test_a_file_that_grows_holds_all_that_was_appended(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Through the cache and past it in turns, wherever the last block ends."""
    content = [np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for size in sizes]
    descriptor = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o666)
    for count, piece in enumerate(content, 1):
        append(descriptor, [piece[:10], piece[10:]])
        assert os.pread(descriptor, sum(sizes) + 1, 0) == b"".join(map(bytes, content[:count]))
    os.close(descriptor)


def test_a_file_system_without_direct_writes_takes_them_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fcntl.fcntl

    def refuse(descriptor: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return asked(descriptor, command, flags)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    content = bytes(range(256)) * 16 * 20
    write_new_file(tmp_path / "file", [content])
    assert (tmp_path / "file").read_bytes() == content


def test_a_kernel_that_forbids_the_staging_areas_takes_the_bytes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(name: str, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "memfd_create", forbid)
    content = bytes(range(256)) * 16 * 20 + b"end"
    write_new_file(tmp_path / "file", [content])
    assert (tmp_path / "file").read_bytes() == content


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_new_file(tmp_path / "file", [b"new"])
    assert (tmp_path / "file").read_bytes() == b"old"


def test_an_error_of_the_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(area: direct._Area, descriptor: int, filled: int, offset: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(direct._Area, "empty_into", full)
    with pytest.raises(OSError, match="No space left"):
        write_new_file(tmp_path / "file", [bytes(9 * 4 * BLOCK)])


def test_a_file_system_that_refuses_only_the_direct_write_takes_it_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = os.pwrite

    def refuse(descriptor: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return written(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse)
    content = bytes(range(256)) * 16 * 20 + b"end"
    write_new_file(tmp_path / "file", [content])
    assert (tmp_path / "file").read_bytes() == content


def test_a_write_that_is_cut_off_inside_a_block_names_its_cause(tmp_path: Path) -> None:
    limited = """
import resource, sys
from pathlib import Path
from counterpoint.transport.files import direct
resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 2**20 + 100,) * 2)
try:
    direct.write_new_file(Path(sys.argv[1]), [bytes(2 * direct._DIRECT_FROM_BYTES)])
except OSError as error:
    sys.exit(error.errno)
"""
    done = subprocess.run([sys.executable, "-c", limited, str(tmp_path / "file")], check=False)
    assert done.returncode == errno.EFBIG
