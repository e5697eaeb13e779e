"""The program at a server: `python -m inference.remote_memory.reader` reads files out of a source's memory into new files.

It reads one line of JSON, `{"agent": base64, "files": [[path, address, bytes], ...]}`. While it works it prints how many bytes
have come, line by line, also when there are no more, and after the last of them `done`. If the source is gone or memory is full
it prints `failed` and the reason. Between reads it looks whether its standard input has ended, and ends then.
"""

from __future__ import annotations

import base64
import os
import select
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import orjson

from inference.remote_memory.agent import MEMORY, MappedFile, begin, open_agent

PIECE_BYTES = 1 << 21
"""Bytes of one read. Those under way advance together: on a slow network the first of them takes as long as all."""

AT_ONCE = 16
"""Reads under way at a time: enough to keep a fast network busy while Python looks at each."""

ALLOCATED_BYTES = 1 << 27
"""Bytes of a new file that get their memory at once."""

LOOK_SECONDS = 0.0005
"""Between looks at the reads under way, where none is done."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes to be read: from where, to where."""

    remote: int
    local: int
    nbytes: int


def main() -> None:
    """Runs to the end."""
    answers = begin()
    request = orjson.loads(sys.stdin.buffer.readline())
    try:
        for come in _read_all(base64.b64decode(request["agent"]), request["files"]):
            _say(answers, str(come))
        _say(answers, "done")
    except Exception as error:  # noqa: BLE001 - NIXL's have only Exception in common, and any of them is the reason
        _say(answers, f"failed {str(error) or type(error).__name__}")
    os._exit(0)  # past NIXL's own end, which waits for its peers


def _say(answers: TextIO, line: str) -> None:
    answers.write(line.replace("\n", " ") + "\n")
    answers.flush()


def _read_all(metadata: bytes, files: list[tuple[str, int, int]]) -> Iterator[int]:
    """Reads the files, one after the other; yields how many bytes have come, now and then.

    Raises `OSError` if memory is full, and NIXL's errors when the source is gone.
    """
    agent = open_agent()
    source = agent.add_remote_agent(metadata)
    come = 0
    for path, address, nbytes in files:
        yield come
        with Path(path).open("x+b") as file:
            for start in range(0, nbytes, ALLOCATED_BYTES):
                os.posix_fallocate(file.fileno(), start, min(ALLOCATED_BYTES, nbytes - start))
                yield come
            if nbytes:
                mapped = MappedFile(agent, file.fileno(), nbytes, writable=True)
                for more in _read(agent, source, deque(_pieces(mapped, address, nbytes))):
                    come += more
                    yield come


def _pieces(file: MappedFile, address: int, nbytes: int) -> Iterator[_Piece]:
    for start in range(0, nbytes, PIECE_BYTES):
        yield _Piece(address + start, file.address + start, min(PIECE_BYTES, nbytes - start))


def _read(agent: Any, source: str, waiting: deque[_Piece]) -> Iterator[int]:
    """Reads all pieces; yields the bytes of those that are done."""
    under_way: list[tuple[Any, int]] = []
    while waiting or under_way:
        while waiting and len(under_way) < AT_ONCE:
            under_way.append(_begin(agent, source, waiting.popleft()))
        if select.select([0], [], [], 0)[0]:
            os._exit(1)  # the server is gone
        done = [each for each in under_way if _is_done(agent, each[0])]
        for each in done:
            agent.release_xfer_handle(each[0])
            under_way.remove(each)
        if done:
            yield sum(nbytes for _, nbytes in done)
        else:
            time.sleep(LOOK_SECONDS)


def _begin(agent: Any, source: str, piece: _Piece) -> tuple[Any, int]:
    local = agent.get_xfer_descs([(piece.local, piece.nbytes, 0)], MEMORY)
    remote = agent.get_xfer_descs([(piece.remote, piece.nbytes, 0)], MEMORY)
    handle = agent.initialize_xfer("READ", local, remote, source)
    agent.transfer(handle)
    return handle, piece.nbytes


def _is_done(agent: Any, handle: Any) -> bool:
    state: str = agent.check_xfer_state(handle)
    if state == "ERR":
        raise RuntimeError("a read has failed")
    return state == "DONE"


if __name__ == "__main__":
    main()
