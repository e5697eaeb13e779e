"""A partition between orchestrator and trainer: the link is back soon after it has ended."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq.auth

from counterpoint.transport.config import TransportConfig
from counterpoint.transport.messages import Hello, Ready
from counterpoint.transport.wires.base import BatchReceiver
from counterpoint.transport.wires.open import open_link, open_receiver
from counterpoint.transport.wires.zmq_wire import silence_of
from tests.support.partition import KINDS, Peer, open_listener, peer_by
from tests.transport.ends import SESSION, hear, take


@pytest.fixture(params=sorted(KINDS))
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """The trainer's host."""
    with peer_by(request.param) as peer:
        yield peer


def ends(directory: Path, peer: Peer) -> tuple[TransportConfig, TransportConfig]:
    """The configuration of an orchestrator and of the trainer at `peer`, with keys."""
    for name in ("trainer", "orchestrator"):
        zmq.auth.create_certificates(directory, name)
    (directory / "authorized").mkdir()
    (directory / "orchestrator.key").rename(directory / "authorized" / "orchestrator.key")
    with peer.run(lambda: open_listener(peer.host)) as listener:
        port = listener.getsockname()[1]
    public = directory / "trainer.key"
    host, reached = peer.reach(port)
    near = TransportConfig(
        address=f"tcp://{host}:{reached}",
        server_public_key_file=public,
        secret_key_file=directory / "orchestrator.key_secret",
        heartbeat_seconds=0.5,
    )
    trainer_files = {"secret_key_file": directory / "trainer.key_secret"}
    far = near.model_copy(
        update={"address": f"tcp://{peer.host}:{port}", "authorized_keys_directory": directory / "authorized"}
        | trainer_files
    )
    return near, far


@pytest.mark.slow
async def test_a_link_is_back_soon_after_a_partition(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel alone tries 7 s after it began, and then after 11 or, before Linux 6.5, after 15 s: too late here."""
    monkeypatch.setattr("counterpoint.transport.wires.reconnecting.CONNECT_MS", 500)
    monkeypatch.setattr("counterpoint.transport.wires.reconnecting.LONGEST_PAUSE_MS", 100)
    near, far = ends(tmp_path, peer)
    receiver = peer.run(lambda: open_receiver(far, tmp_path))
    link = open_link(near, tmp_path)
    greeted = asyncio.create_task(asyncio.to_thread(answer, receiver))
    peer.cut()
    await link.start(Hello("default", 0))
    await asyncio.sleep(7.5)  # the partition
    peer.heal()
    async with asyncio.timeout(3):
        assert isinstance(await hear(link), Ready)
    await greeted
    # An established link that is cut, and whose peer is found again.
    greeted = asyncio.create_task(asyncio.to_thread(answer, receiver))
    peer.cut()
    cut_at = time.time()
    await asyncio.sleep(7.5)
    assert link.outage is not None
    assert cut_at - 5 <= link.outage.since <= cut_at + 0.2, "when the trainer was heard last, not when that was noticed"
    peer.heal()
    async with asyncio.timeout(3):
        assert isinstance(await hear(link), Ready)
    await greeted
    await link.close()
    receiver.close()


def answer(receiver: BatchReceiver) -> None:
    """Answers the next Hello."""
    run_id, _ = take(receiver, Hello)
    receiver.send(run_id, Ready(1, 4, SESSION))


def same_as(descriptor: int) -> list[int]:
    """The descriptors of this process that are the same file: other tests' threads open and close others meanwhile."""
    file, found = os.fstat(descriptor), []
    for number in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):  # it was closed meanwhile
            if os.path.samestat(os.fstat(number), file):
                found.append(number)
    return found


def test_how_long_a_peer_is_silent_is_asked_without_keeping_a_descriptor(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as connection,
        (tmp_path / "file").open("wb") as file,  # it has got the number of a connection that ZMQ has closed
    ):
        assert silence_of(connection.fileno()) is not None
        assert silence_of(file.fileno()) is None
        assert silence_of(-1) is None
        for each in (connection, file):
            assert same_as(each.fileno()) == [each.fileno()]
        connection.sendall(b"it is still open")
