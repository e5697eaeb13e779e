"""The program at a server: `python -m inference.remote_memory.reader` reads files out of a source's memory into new files.

It reads one line of JSON, `{"agent": base64, "files": [[path, address, bytes], ...]}`, prints how many bytes have come, line by
line, and after the last of them `done`. If the source is gone it prints `failed` and the reason. It ends at once when its
standard input does.
"""

from __future__ import annotations

import base64
import os
import select
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import orjson

from inference.remote_memory.agent import MEMORY, MappedFile, open_agent, own_output

PIECE_BYTES = 1 << 24
"""Bytes of one read."""

AT_ONCE = 16
"""Reads under way at a time: enough to keep a fast network busy while Python looks at each."""

LOOK_SECONDS = 0.001
"""Between looks at the reads under way."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes to be read: from where, to where."""

    remote: int
    local: int
    nbytes: int


def main() -> None:
    """Runs to the end."""
    answers = own_output()
    request = orjson.loads(sys.stdin.buffer.readline())
    try:
        agent = open_agent()
        mapped = [(_make(agent, Path(path), nbytes), address, nbytes) for path, address, nbytes in request["files"]]
        source = agent.add_remote_agent(base64.b64decode(request["agent"]))
        pieces = [
            piece for file, address, nbytes in mapped if file is not None for piece in _pieces(file, address, nbytes)
        ]
        for come in _read(agent, source, deque(pieces)):
            _say(answers, str(come))
        _say(answers, "done")
    except Exception as error:  # noqa: BLE001 - NIXL's have only Exception in common, and any of them is the reason
        _say(answers, f"failed {str(error) or type(error).__name__}")
    os._exit(0)  # past NIXL's own end, which waits for its peers


def _say(answers: TextIO, line: str) -> None:
    answers.write(line.replace("\n", " ") + "\n")
    answers.flush()


def _make(agent: Any, path: Path, nbytes: int) -> MappedFile | None:
    """Makes a file of `nbytes` and registers its memory, if it has any."""
    with path.open("x+b") as file:
        file.truncate(nbytes)
        return MappedFile(agent, file.fileno(), nbytes, writable=True) if nbytes else None


def _pieces(file: MappedFile, address: int, nbytes: int) -> Iterator[_Piece]:
    for start in range(0, nbytes, PIECE_BYTES):
        yield _Piece(address + start, file.address + start, min(PIECE_BYTES, nbytes - start))


def _read(agent: Any, source: str, waiting: deque[_Piece]) -> Iterator[int]:
    """Reads all, and yields how many bytes have come whenever more have. Raises NIXL's errors when the source is gone."""
    under_way: list[tuple[Any, int]] = []
    come = 0
    while waiting or under_way:
        while waiting and len(under_way) < AT_ONCE:
            under_way.append(_begin(agent, source, waiting.popleft()))
        if select.select([0], [], [], LOOK_SECONDS)[0]:
            os._exit(1)  # the server is gone
        before = come
        for handle, nbytes in list(under_way):
            if _is_done(agent, handle):
                agent.release_xfer_handle(handle)
                under_way.remove((handle, nbytes))
                come += nbytes
        if come > before:
            yield come


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
