"""The wire over a shared directory, for machines that share a disk and no network.

Under the exchange directory the trainer keeps a beacon, `trainer.json`, with the session id of this trainer process and a
counter that rises with each heartbeat. The messages of a session are in its directory, as
`<session>/to_trainer/<number>-<sender>.msg` or `<session>/<sender>/<number>.msg`: one atomic file a message
(`codec.file_buffers`), deleted once read. A sender is one connection of one run. A trainer that starts again begins a new
session, so it never reads messages to an earlier trainer; a link that reads another session, or no heartbeat, connects anew.
No clocks are compared. Nothing here is flushed to disk: the orchestrator's durable record has what a crash of the machine
would lose, and a heartbeat that waits behind a checkpoint's flush is late.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import select
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from counterpoint.transport.codec import MAX_HEADER_BYTES, MAX_MESSAGE_BYTES, CodecError, file_buffers, read_frames
from counterpoint.transport.files.atomic import Buffer, remove_directory, write_atomically
from counterpoint.transport.files.lock import take_listener_lock
from counterpoint.transport.files.shared_directory import make_shared
from counterpoint.transport.wires.link import Arrived, Connected, Lost
from counterpoint.transport.wires.receiver import Arrival

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
_BEACON = "trainer.json"
_TO_TRAINER = "to_trainer"
_MESSAGE = re.compile(r"\d{12}-(?P<sender>[A-Za-z0-9][A-Za-z0-9_.-]{0,90})\.msg")
_SESSION = re.compile(r"[0-9a-f]{16}")


class DirectoryConnection:
    """`link.Connection` through the exchange directory `root`."""

    def __init__(self, root: Path, run_id: str, heartbeat_seconds: float) -> None:
        self.peer = f"the trainer at {root}"
        self._root = root
        self._run_id = run_id
        self._timeout_seconds = 3 * heartbeat_seconds
        self._seeking = False
        self._session: Path | None = None
        self._beacon: tuple[str, int] | None = None
        """The last one read, also of a trainer that is lost: the same beacon again does not prove a live trainer."""
        self._seen = 0.0
        self._sender = ""
        self._written = 0

    def open(self) -> None:
        """See `Connection`."""
        self._leave()
        self._seeking = True

    def poll(self, wake: int, timeout: float) -> list[Connected | Lost | Arrived]:
        """See `Connection`."""
        woken = select.poll()  # `select.select` refuses descriptors above 1,023
        woken.register(wake, select.POLLIN)
        woken.poll(1000 * min(timeout, _POLL_SECONDS))
        beacon = _read_beacon(self._root / _BEACON)
        if self._session is None:
            if not self._seeking or beacon is None or beacon == self._beacon:
                return []
            return [self._join(beacon)]
        events: list[Connected | Lost | Arrived] = [*self._read_messages(self._session / self._sender)]
        reason = self._why_lost(self._session.name, beacon)
        if reason is not None:
            self._leave()
            events.append(Lost(reason, time.monotonic() - self._seen))
        return events

    def write(self, frames: Sequence[Buffer]) -> None:
        """See `Connection`. Raises `OSError` when the disk is full or forbids it."""
        assert self._session is not None
        self._written += 1
        path = self._session / _TO_TRAINER / f"{self._written:012d}-{self._sender}.msg"
        # A trainer that just ended took its directory with it; the next poll finds its beacon gone.
        with contextlib.suppress(FileNotFoundError):
            write_atomically(path, *file_buffers(frames), durable=False)

    def close(self, linger: float) -> None:
        """See `Connection`. Written messages stay for the trainer to read, so there is nothing to wait for."""
        self._leave()

    def _join(self, beacon: tuple[str, int]) -> Connected | Lost:
        self._beacon, self._seen = beacon, time.monotonic()
        self._sender = f"{self._run_id}-{secrets.token_hex(8)}"
        self._session = self._root / beacon[0]
        self._seeking = False
        try:
            make_shared(self._session / self._sender)
        except FileNotFoundError:
            self._leave()
            return Lost("its session ended")
        return Connected()

    def _why_lost(self, session: str, beacon: tuple[str, int] | None) -> str | None:
        if beacon is None:
            return "it ended"
        if beacon[0] != session:
            return "another trainer took its place"
        if beacon != self._beacon:
            self._beacon, self._seen = beacon, time.monotonic()
        elif time.monotonic() - self._seen > self._timeout_seconds:
            return f"no heartbeat for {self._timeout_seconds:g} s"
        return None

    def _read_messages(self, directory: Path) -> list[Arrived]:
        messages: list[Arrived] = []
        for path in sorted(directory.glob("[0-9]*.msg")):
            try:
                messages.append(read_frames(path, MAX_MESSAGE_BYTES))
            except CodecError as error:
                logger.warning("dropped a message from %s: %s: %s", self.peer, path, error)
            path.unlink(missing_ok=True)
        return messages

    def _leave(self) -> None:
        if self._session is not None:
            shutil.rmtree(self._session / self._sender, ignore_errors=True)
        self._session = None


class DirectoryListener:
    """`receiver.Listener` through the exchange directory `root`. Raises `OSError` when another trainer uses it."""

    def __init__(self, root: Path, heartbeat_seconds: float, max_batch_bytes: int) -> None:
        self._root = root
        self._max_batch_bytes = max_batch_bytes
        self._heartbeat_seconds = heartbeat_seconds
        self._written = 0
        root.parent.mkdir(parents=True, exist_ok=True)
        make_shared(root)
        self._lock: int | None = take_listener_lock(root / "trainer.lock", str(root))
        for entry in root.iterdir():
            if _SESSION.fullmatch(entry.name):
                remove_directory(entry)  # of a trainer that has ended, since this one holds the lock
        self._session = root / secrets.token_hex(8)
        self._inbox = self._session / _TO_TRAINER
        make_shared(self._session)
        make_shared(self._inbox)
        self._stop = threading.Event()
        self._beat(0)
        self._heart = threading.Thread(target=self._keep_beating, name="exchange-heartbeat", daemon=True)
        self._heart.start()

    def poll(self, timeout: float) -> Arrival | None:
        """See `Listener`."""
        deadline = time.monotonic() + timeout
        while True:
            if (path := self._next_message()) is not None:
                return self._read(path)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return None
            time.sleep(min(remaining, _POLL_SECONDS))

    def write(self, sender: bytes, frames: Sequence[Buffer]) -> bool:
        """See `Listener`."""
        self._written += 1
        try:
            path = self._session / sender.decode() / f"{self._written:012d}.msg"
            write_atomically(path, *file_buffers(frames), durable=False)
        except FileNotFoundError:
            return False
        return True

    def close(self, linger: float) -> None:
        """See `Listener`. Answers stay until the next trainer removes them; batches are removed."""
        if self._lock is None:
            return
        self._stop.set()
        self._heart.join()
        (self._root / _BEACON).unlink(missing_ok=True)
        shutil.rmtree(self._inbox, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    def _next_message(self) -> Path | None:
        with os.scandir(self._inbox) as entries:
            names = [
                entry.name
                for entry in entries
                if _MESSAGE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            ]
        return self._inbox / min(names) if names else None

    def _read(self, path: Path) -> Arrival:
        match = _MESSAGE.fullmatch(path.name)
        assert match is not None
        frames: list[Buffer] | CodecError
        try:
            frames = read_frames(path, self._max_batch_bytes + MAX_HEADER_BYTES)
        except CodecError as error:
            frames = error
        path.unlink()
        return Arrival(match["sender"].encode(), str(self._root), frames)

    def _beat(self, count: int) -> None:
        beacon = {"session": self._session.name, "beat": count}
        write_atomically(self._root / _BEACON, json.dumps(beacon).encode(), durable=False)

    def _keep_beating(self) -> None:
        count = 0
        while not self._stop.wait(self._heartbeat_seconds):
            count += 1
            try:
                self._beat(count)
            except OSError as error:
                logger.warning("cannot write the heartbeat in %s: %s", self._root, error)


def _beginning(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1024)


def _read_beacon(path: Path) -> tuple[str, int] | None:
    try:
        try:
            content = _beginning(path)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            content = _beginning(path)  # on NFS it may be replaced between opening and reading
        beacon = json.loads(content)
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("%s is no trainer's beacon: %s", path, error)
        return None
    match beacon:
        case {"session": str(session), "beat": int(beat)} if _SESSION.fullmatch(session):
            return session, beat
        case _:
            return None
