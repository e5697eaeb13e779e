"""Sockets on this machine: other users do not reach them, or are not heard."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from counterpoint.cluster.backends.base import Bundle
from counterpoint.cluster.backends.keeper_link import WORKERS
from counterpoint.cluster.backends.local import LocalBackend
from counterpoint.cluster.backends.order import WorkerOrder
from counterpoint.cluster.master import control
from counterpoint.cluster.master.control import ControlServer
from counterpoint.cluster.spec import JobSpec, Resources, RoleSpec
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.gateway import server as gateway
from counterpoint.environments.workers import pool
from counterpoint.inference.config import InferenceConfig
from counterpoint.transport.loopback import is_loopback
from counterpoint.transport.process.keeper import main as keeper
from counterpoint.transport.process.notify import NotifySocket, notify
from counterpoint.transport.rpc import stream
from counterpoint.transport.rpc.connection import PeerAsk, RpcError
from counterpoint.transport.rpc.stream import UnixListener, connect_unix
from counterpoint.transport.telemetry import endpoint
from counterpoint.transport.wires.endpoint import socket_path
from counterpoint.transport.wires.zmq_wire import ZmqListener


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """Others may read what we make, and not write to it, unless the code says otherwise."""
    former = os.umask(0o022)
    yield
    os.umask(former)


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory with a short path, as a UNIX socket needs one."""
    with tempfile.TemporaryDirectory(prefix="cp") as directory:
        yield Path(directory)


def mode(path: Path) -> int:
    found = path.lstat().st_mode
    assert stat.S_ISSOCK(found)
    return stat.S_IMODE(found)


def pretend_to_be_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel says of a peer is then another user's id than ours."""
    monkeypatch.setattr(os, "getuid", lambda: 12345)


def test_a_notification_of_another_user_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listener = NotifySocket()
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)
    try:
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
            pretend_to_be_another_user(patched)
            assert notify("READY=1")
            assert listener.receive() is None
        assert "another user" in caplog.text
        assert notify("READY=1")
        assert listener.receive() == {"READY": "1"}
    finally:
        listener.close()


async def test_the_masters_control_socket_answers_its_user_alone(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    asked: list[dict[str, Any]] = []

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return {}

    path = short / "control.sock"
    server = ControlServer(path, answer)
    await server.start()
    try:
        assert mode(path) == 0o600
        assert await asyncio.to_thread(control.ask, path, {"kind": "status"}) == {}
        with monkeypatch.context() as patched:
            patched.setattr(stream, "_peer", lambda end: (os.getpid(), os.getuid() + 1))
            with pytest.raises(control.NoMaster):
                await asyncio.to_thread(control.ask, path, {"kind": "status"})
    finally:
        await server.close()
    assert len(asked) == 1


async def test_calls_of_another_user_are_not_heard(monkeypatch: pytest.MonkeyPatch, short: Path) -> None:
    asked: list[PeerAsk] = []
    listener = UnixListener(asked.append, most_asks=4)
    await listener.start(str(short / "calls"))
    try:
        assert mode(short / "calls") == 0o600
        monkeypatch.setattr(stream, "_peer", lambda end: (os.getpid(), os.getuid() + 1))
        stranger = await connect_unix(str(short / "calls"), "a worker", 60.0)
        with pytest.raises(RpcError, match="broke"):
            await stranger.ask([b"x"], 60.0)
    finally:
        listener.close()
    assert not asked


@pytest.mark.slow
async def test_a_keeper_listens_for_its_user_alone(short: Path) -> None:
    backend = LocalBackend(JobSpec(name="j", roles=(RoleSpec(name="r", command=("sleep", "600")),)), short, 1)
    await backend.allocate(Bundle("r-0", {"r-0": Resources()}), ())
    await backend.create(WorkerOrder("r-0", 1, "r-0", ("sleep", "600"), {}, str(short / "log")))
    (path,) = (short / WORKERS).glob("*.sock")
    assert mode(path) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    await backend.close(end=True)


def test_a_keeper_answers_its_user_alone_wherever_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfAnother:
        """What the kernel says of a peer."""

        size = 12

        def unpack(self, _: bytes) -> tuple[int, int, int]:
            return 1, os.getuid() + 12345, 1

    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as peer:
        listener.bind(f"\0counterpoint-test-{os.getpid()}")  # as below an actor on Ray
        listener.listen()
        kept = keeper.Keeper(listener)
        peer.connect(listener.getsockname())
        monkeypatch.setattr(keeper, "_CREDENTIALS", OfAnother())
        kept._accept()
        assert not peer.recv(1), "the connection has ended"
        assert not kept._peers
        kept._selector.close()


async def test_workers_of_an_environment_are_their_users_alone(short: Path) -> None:
    workers = pool.WorkerPool(EnvironmentConfig(name="e", kind="reverse-text", workers=1), 1, False)
    workers._loop = asyncio.get_running_loop()
    path = Path(workers._listen(short).removeprefix("ipc://"))
    try:
        assert mode(path) == 0o600
    finally:
        assert workers._wire is not None
        assert workers._context is not None
        workers._wire.close()
        workers._context.term()


def test_others_cannot_connect_to_the_wire(short: Path) -> None:
    path = short / "wire.sock"
    listener = ZmqListener(f"ipc://{path}", None, 5.0, 2**20, 1)
    try:
        assert not mode(path) & 0o022, "to connect to a UNIX socket one must be able to write to it"
    finally:
        listener.close(0.0)


def test_a_directory_for_sockets_that_is_anothers_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private = tmp_path / f"counterpoint-{os.getuid()}"
    private.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="mode 0700"):
        socket_path(Path("/" + "x" * 200), "name")
    private.rmdir()
    private.symlink_to(tmp_path)
    with pytest.raises(PermissionError, match="mode 0700"):
        socket_path(Path("/" + "x" * 200), "name")


def test_what_is_for_this_machine_listens_on_loopback() -> None:
    assert is_loopback(gateway.HOST)
    assert is_loopback(endpoint.HOST)
    assert is_loopback(InferenceConfig.model_fields["host"].default), "as of the server of `env check`"
