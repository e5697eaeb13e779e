"""Files of others: only regular ones are read, none waits, and what comes out is what it should be, or says why not."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.transport.files.untrusted import (
    MAX_DEPTH,
    UntrustedFileError,
    parse_json,
    read_bytes,
    read_json,
    read_text,
    read_toml,
)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    (path.parent / "target").write_bytes(b"{}")
    path.symlink_to(path.parent / "target")


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (make_fifo, "a FIFO"),
        (make_link, "a symbolic link"),
        (make_loop, "a symbolic link"),
        (make_socket, "a socket"),
        (Path.mkdir, "a directory"),
    ],
)
@pytest.mark.parametrize("read", [read_bytes, read_text, read_toml, read_json])
def test_what_is_no_regular_file_is_not_read(
    tmp_path: Path, make: Callable[[Path], None], found: str, read: Callable[[Path, int], Any]
) -> None:
    path = tmp_path / "file"
    make(path)
    with pytest.raises(UntrustedFileError, match=f"file is {found}.*expected a regular file"):
        read(path, 100)


def test_no_more_is_read_than_allowed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(UntrustedFileError, match="has 5 bytes; at most 4 are read"):
        read_bytes(path, 4)
    os.truncate(path, 2**40)  # sparse
    with pytest.raises(UntrustedFileError, match=f"has {2**40} bytes"):
        read_bytes(path, 4)
    endless = Path("/proc/self/status")  # its size is 0, and it has content
    with pytest.raises(UntrustedFileError, match="has 5 bytes; at most 4"):
        read_bytes(endless, 4)


def test_a_missing_file_stays_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_toml(tmp_path / "nothing", 10)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        read_json(tmp_path / "file" / "inside", 10)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"a = " + b"[" * 100_000, "more than 32 deep"),
        (b"a = " + b"{b = " * 100_000, "more than 32 deep"),
        (b"a = " + b"[" * 40 + b"1" + b"]" * 40, "more than 32 deep"),
        (b"a = [" + b", ".join([b"[1]"] * 3) + b"\n", "this is not TOML"),
        (b"a" + b".a" * 400_000 + b" = 1", "dotted key of more than 32 parts"),
        (b"[ a" + b" . \"b\" . 'c'" * 20_000 + b"]", "dotted key of more than 32 parts"),
        (b"a" + b'."\\""' * 40 + b" = 1", "dotted key of more than 32 parts"),
        (b"a" + b".'\"\\'" * 40 + b" = 1", "dotted key of more than 32 parts"),
        (b"a = '\xff'", "this is not TOML"),
        (b"a = " + b"9" * 5000, "integer of more than"),
        (b"a = 0x" + b"f" * 5000, "integer of more than"),
    ],
)
def test_toml_that_exhausts_a_parser_is_refused(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UntrustedFileError, match=found):
        read_toml(path, 2**20)


_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.integers(-(2**62), 2**62) | st.text(max_size=20) | st.booleans() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@pytest.mark.slow
@given(table=st.dictionaries(st.text(max_size=8), _VALUES, max_size=5), depth=st.integers(0, 2 * MAX_DEPTH))
def test_toml_within_the_bounds_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any], depth: int
) -> None:
    deep: Any = 1
    for _ in range(depth):
        deep = [deep]
    path = tmp_path_factory.getbasetemp() / "written.toml"
    path.write_text(tomli_w.dumps({**table, "deep": deep}), encoding="utf-8", newline="")
    if depth < MAX_DEPTH:
        assert read_toml(path, 2**20) == {**table, "deep": deep}
    else:
        with pytest.raises(UntrustedFileError, match="deep"):
            read_toml(path, 2**20)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"null", "found NoneType"),
        (b"[]", "found list"),
        (b'"text"', "found str"),
        (b"[" * 100_000, "more than 512 deep"),
        (b'{"a":' * 100_000, "more than 512 deep"),
        (b'{"a": NaN}', "this is not JSON"),
        (b'{"a": ' + b"[" * 512 + b"1" + b"]" * 512 + b"}", "more than 512 deep"),
        (b'{"a":' * 1000 + b"{}" + b"}" * 1000, "more than 512 deep"),
        (b"\xff", "this is not JSON"),
        (b"", "this is not JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, content: bytes, found: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(UntrustedFileError, match=f"file: .*{found}"):
        read_json(path, 2**20)
    with pytest.raises(UntrustedFileError, match=found):
        parse_json(content)


def test_a_json_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b'{"step": 3}')
    assert read_json(tmp_path / "file", 100) == {"step": 3}
    assert read_text(tmp_path / "file", 100) == '{"step": 3}'
    deep = orjson.loads(b'{"a": ' + b"[" * 253 + b"1" + b"]" * 253 + b"}")
    assert parse_json(orjson.dumps(deep)) == deep


def test_text_for_people_cannot_steer_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"\x1b[2Jit sent\n\xff")
    assert read_text(tmp_path / "file", 100) == "\\x1b[2Jit sent\n\N{REPLACEMENT CHARACTER}"
