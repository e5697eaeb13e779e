"""What a process under test tells its supervisor, taken at once: the kernel keeps ten messages and refuses what follows."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from counterpoint.transport.process.notify import NotifySocket


@contextmanager
def notifications(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, str]]]:
    """Yields the messages to `$NOTIFY_SOCKET` so far; when the block has ended, all of them."""
    socket, ended = NotifySocket(), threading.Event()
    said: list[dict[str, str]] = []

    def take() -> None:
        is_last = False
        while not is_last:
            is_last = ended.is_set()
            while (message := socket.receive()) is not None:
                said.append(message)
            select.select([socket], [], [], 0 if is_last else 0.05)

    thread = threading.Thread(target=take, name="notifications")
    with monkeypatch.context() as patch:
        patch.setenv("NOTIFY_SOCKET", socket.address)
        thread.start()
        try:
            yield said
        finally:
            ended.set()
            thread.join()
            socket.close()
