"""Which errors of a start may not come again, whatever has been raised from them."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest
from safetensors import SafetensorError

from counterpoint.transport.process.permanent_errors import (
    DISK_FULL,
    PASSING,
    exit_code_of,
    is_disk_full,
    is_final,
    is_passing,
)


def failed(cause: BaseException, explicitly: bool) -> BaseException:
    try:
        try:
            raise cause
        except BaseException as error:
            if explicitly:
                raise ValueError("it did not start") from error
            raise ValueError("it did not start")  # noqa: B904 - its context is what is tested
    except ValueError as error:
        return error


@pytest.mark.parametrize("explicitly", [True, False])
@pytest.mark.parametrize(
    ("cause", "passing"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), True),
        (ConnectionError("in words only"), True),
        (TimeoutError(), True),
        (OSError(errno.ESTALE, "stale"), True),
        (OSError(errno.EADDRINUSE, "in use"), True),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), True),
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (PermissionError(errno.EACCES, "denied"), False),
        (OSError("in words only"), False),
        (KeyError("column"), False),
    ],
    ids=repr,
)
def test_an_error_is_passing_if_what_it_came_from_is(cause: BaseException, passing: bool, explicitly: bool) -> None:
    assert is_passing(cause) is passing
    assert is_passing(failed(cause, explicitly)) is passing


def test_a_cause_that_was_taken_off_does_not_count() -> None:
    def hidden() -> None:
        try:
            raise ConnectionError("lost")
        except ConnectionError:
            raise ValueError("of its own") from None

    with pytest.raises(ValueError, match="of its own") as raised:
        hidden()
    assert not is_passing(raised.value)


def test_a_start_is_not_tried_again_for_what_a_person_must_correct() -> None:
    assert is_final(ValueError("a wrong value"))
    assert is_final(PermissionError(errno.EACCES, "denied"))
    assert not is_final(OSError(errno.EADDRINUSE, "in use"))
    unread = failed(OSError(errno.ESTALE, "stale"), explicitly=True)
    assert isinstance(unread, ValueError)
    assert not is_final(unread), "the value was never seen"
    errors = (ValueError("wrong"), PermissionError(errno.EACCES, "denied"), OSError(errno.EADDRINUSE, "in use"), unread)
    assert [exit_code_of(error) for error in errors] == [2, 2, PASSING, PASSING]
    assert exit_code_of(FileNotFoundError(errno.ENOENT, "no such file")) == 1


def test_a_full_disk_has_an_exit_code_of_its_own() -> None:
    with pytest.raises(OSError, match="space") as raised, Path("/dev/full").open("wb", buffering=0) as full:
        full.write(b"some bytes")
    assert exit_code_of(raised.value) == DISK_FULL
    assert is_disk_full(failed(OSError(errno.EDQUOT, "quota"), explicitly=True))
    assert is_disk_full(SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"))
    assert exit_code_of(OSError(errno.EIO, "broken")) == PASSING
