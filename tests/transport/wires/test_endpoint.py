"""Addresses and keys: what is refused, and CURVE between real sockets."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth

from counterpoint.transport.config import TransportConfig
from counterpoint.transport.messages import Bye, Hello, Offer, Ready
from counterpoint.transport.records import Batch
from counterpoint.transport.wires.base import BatchReceiver
from counterpoint.transport.wires.endpoint import (
    NODE_ADDRESS,
    TOLD,
    find_address,
    is_everywhere,
    load_keys,
    resolve_address,
    tell_address,
)
from counterpoint.transport.wires.open import open_link, open_receiver
from tests.support.batches import make_batch
from tests.support.polling import wait_until
from tests.support.ports import free_port, taken_port
from tests.transport.ends import SESSION, Stranger, handshake, hello_frames, refuse, take


def test_the_default_is_a_socket_in_the_job_directory(tmp_path: Path) -> None:
    assert resolve_address(TransportConfig(), tmp_path) == f"ipc://{tmp_path}/transport.sock"


def test_a_long_path_falls_back_to_a_private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        deep = tmp_path / ("d" * 120)
        address = resolve_address(TransportConfig(), deep)
        assert address == resolve_address(TransportConfig(), deep)
        assert address != resolve_address(TransportConfig(), tmp_path / ("e" * 120))
        path = Path(address.removeprefix("ipc://"))
        assert len(os.fsencode(path)) <= zmq.IPC_PATH_MAX_LEN
        assert path.parent.stat().st_mode & 0o777 == 0o700
        path.parent.chmod(0o755)
        with pytest.raises(PermissionError, match="mode 0700"):
            resolve_address(TransportConfig(), deep)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://[::1]:5555", "ipc:///tmp/a"]
)
def test_local_addresses_need_no_keys(address: str, tmp_path: Path) -> None:
    assert resolve_address(TransportConfig(address=address), tmp_path) == address


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://trainer.example:5555", "tcp://[::]:5555"]
)
def test_other_machines_need_keys(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs CURVE keys"):
        open_receiver(TransportConfig(address=address), tmp_path)
    with pytest.raises(ValueError, match="needs CURVE keys"):
        open_link(TransportConfig(address=address), tmp_path)


@pytest.mark.parametrize(
    "address",
    [
        "udp://127.0.0.1:1",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:70000",
        "ipc://",
        "ipc://" + "x" * 108,
    ],
)
def test_malformed_addresses_are_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"transport\.address"):
        resolve_address(TransportConfig(address=address), tmp_path)


@pytest.mark.parametrize("content", [b"", b"not a certificate", b"\xff\xfe\x00"])
def test_a_file_that_is_no_certificate_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.key"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"server_public_key_file: .*broken\.key"):
        load_keys(TransportConfig(server_public_key_file=path, secret_key_file=path))
    with pytest.raises(ValueError, match="come together"):
        load_keys(TransportConfig(secret_key_file=path))


class Keyring:
    """Key files of a trainer, an orchestrator it knows and one it does not."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.authorized = directory / "authorized"
        self.authorized.mkdir()
        for name in ("trainer", "stranger"):
            zmq.auth.create_certificates(directory, name)
        zmq.auth.create_certificates(self.authorized, "orchestrator")
        (self.authorized / "orchestrator.key_secret").rename(directory / "orchestrator.key_secret")
        self.directory = directory

    def config(self, name: str, **fields: Any) -> TransportConfig:
        return TransportConfig(
            address=f"tcp://127.0.0.1:{self.port}",
            server_public_key_file=self.directory / "trainer.key",
            secret_key_file=self.directory / f"{name}.key_secret",
            authorized_keys_directory=self.authorized,
            heartbeat_seconds=1.0,
        ).model_copy(update=fields)

    def cut(self, name: str) -> Path:
        """A copy of a file whose keys lack their last character."""
        cut = self.directory / f"cut-{name}"
        cut.write_bytes(re.sub(rb'."\n', b'"\n', (self.directory / name).read_bytes()))
        return cut


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path)


def hear_out(receiver: BatchReceiver) -> None:
    """Answers the next Hello; refusals of the strangers may come before it."""
    run_id, _ = take(receiver, Hello)
    receiver.send(run_id, Ready(1, 4, SESSION))


@pytest.mark.slow
async def test_only_authorized_keys_connect(keyring: Keyring, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    receiver = open_receiver(keyring.config("trainer"), tmp_path)
    unknown = open_link(keyring.config("stranger"), tmp_path)
    wrong_server = open_link(keyring.config("orchestrator", server_public_key_file=tmp_path / "stranger.key"), tmp_path)
    known = open_link(keyring.config("orchestrator"), tmp_path)
    plain = Stranger(TransportConfig(address=f"tcp://127.0.0.1:{keyring.port}"), tmp_path)
    try:
        with suppress(zmq.Again):  # its handshake fails, possibly before this line
            plain.write(hello_frames())
        for link, run_id in ((unknown, "stranger"), (wrong_server, "misled")):
            await link.start(Hello(run_id, 0))
        await asyncio.to_thread(refuse, receiver, 3)
        assert f"of unknown address; it connected to this end, tcp://127.0.0.1:{keyring.port}" in caplog.text
        with caplog.at_level(logging.WARNING):
            await asyncio.to_thread(wait_until, lambda: "key is not among the trainer's" in caplog.text, "the reason")
        # What whoever gives up on the trainer says.
        told = "key is not among the trainer's"
        await asyncio.to_thread(wait_until, lambda: told in str(unknown.outage), "the reason of the outage")
        for link in (unknown, wrong_server):
            await link.close()
        plain.close()
        await known.start(Hello("default", 0))
        await asyncio.to_thread(hear_out, receiver)
        assert await asyncio.wait_for(known.receive(), 60) == Ready(1, 4, SESSION)
        await known.send(Offer(make_batch(), SESSION))
        assert (await asyncio.to_thread(take, receiver, Batch))[0] == "default"
    finally:
        for link in (unknown, wrong_server, known):
            await link.close()
        receiver.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda keys: {"authorized_keys_directory": None}, "authorized_keys_directory: the end that listens needs one"),
        (lambda keys: {"authorized_keys_directory": keys.directory / "missing"}, "authorized_keys_directory: "),
        (lambda keys: {"secret_key_file": keys.directory / "stranger.key_secret"}, "is not the secret of"),
        (lambda keys: {"secret_key_file": keys.directory / "trainer.key"}, "holds no secret key"),
        (lambda keys: {"server_public_key_file": keys.cut("trainer.key")}, "holds no public key"),
        (lambda keys: {"secret_key_file": keys.cut("trainer.key_secret")}, "holds no secret key"),
    ],
)
def test_a_trainer_with_wrong_keys_does_not_start(
    keyring: Keyring, tmp_path: Path, change: Callable[[Keyring], dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_receiver(keyring.config("trainer", **change(keyring)), tmp_path)


def test_keys_are_not_shown(keyring: Keyring) -> None:
    keys = load_keys(keyring.config("trainer"))
    assert keys is not None
    assert keys.secret.decode() not in repr(keys)


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with taken_port() as port:
        address = f"tcp://127.0.0.1:{port}"
        with pytest.raises(OSError, match=f"cannot listen on {address}: another process"):
            open_receiver(TransportConfig(address=address), tmp_path)


@pytest.mark.parametrize(
    ("address", "node", "told"),
    [
        ("tcp://0.0.0.0:5555", "10.0.0.7", "tcp://10.0.0.7:5555"),
        ("tcp://*:5555", "fd00::7", "tcp://[fd00::7]:5555"),
        ("tcp://0.0.0.0:5555", "", "tcp://127.0.0.1:5555"),
        ("tcp://[::]:5555", "", "tcp://[::1]:5555"),
        ("tcp://10.0.0.8:5555", "10.0.0.7", "tcp://10.0.0.8:5555"),
        ("ipc:///tmp/wire", "10.0.0.7", "ipc:///tmp/wire"),
    ],
)
def test_who_listens_on_every_address_tells_where_it_is_reached(
    address: str, node: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NODE_ADDRESS, node)
    here = address.replace("0.0.0.0", "127.0.0.1").replace("*", "127.0.0.1").replace("[::]", "[::1]")
    assert find_address(address, tmp_path) == here, "before it has told"
    tell_address(address, tmp_path)
    assert find_address(address, tmp_path) == told
    assert is_everywhere(address) == (address != told and here != address) == (tmp_path / TOLD).exists()
    for other in ("ipc:///tmp/another", "tcp://*:5555", "tcp://-:5555", "tcp://_.a:5555", "tcp://a:5555\n"):
        (tmp_path / TOLD).write_text(other)
        assert find_address(address, tmp_path) == here, "what ZMQ would not connect to is not used"
    (tmp_path / TOLD).unlink()
    os.mkfifo(tmp_path / TOLD)
    assert find_address(address, tmp_path) == here, "nor waited for"


@pytest.mark.slow
async def test_a_trainer_is_found_where_it_tells_to_be(
    keyring: Keyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = {"address": f"tcp://0.0.0.0:{keyring.port}", "authorized_keys_directory": keyring.directory}
    both = keyring.config("trainer", **everywhere)  # as in a job, which has one table for both ends
    monkeypatch.setenv(NODE_ADDRESS, "127.0.0.9")
    (tmp_path / TOLD).write_text(f"tcp://127.0.0.8:{free_port()}")  # of an earlier trainer, whose node is gone
    link = open_link(both, tmp_path)
    await link.start(Hello("default", 0))
    try:
        for session in (SESSION, SESSION + 1):
            receiver = open_receiver(both, tmp_path)
            try:
                assert (tmp_path / TOLD).read_text() == f"tcp://127.0.0.9:{keyring.port}"
                run_id, _ = await asyncio.to_thread(take, receiver, Hello)
                receiver.send(run_id, Ready(1, 4, session))
                assert await asyncio.wait_for(link.receive(), 60) == Ready(1, 4, session)
            finally:
                receiver.close()
            assert isinstance(await asyncio.wait_for(link.receive(), 60), Bye)
            (tmp_path / TOLD).write_text(f"tcp://127.0.0.8:{free_port()}")
    finally:
        await link.close()


async def test_a_stale_socket_file_is_no_obstacle(tmp_path: Path) -> None:
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "transport.sock"))
    stale.close()
    receiver = open_receiver(TransportConfig(), tmp_path)
    link = open_link(TransportConfig(), tmp_path)
    await link.start(Hello("default", 0))
    await handshake(link, receiver)
    await link.close()
    receiver.close()


@pytest.mark.slow
def test_a_trainer_that_cannot_tell_its_address_listens_no_more(keyring: Keyring, tmp_path: Path) -> None:
    (tmp_path / TOLD).mkdir()
    everywhere = {"address": f"tcp://0.0.0.0:{keyring.port}", "authorized_keys_directory": keyring.directory}
    with pytest.raises(OSError, match=TOLD):
        open_receiver(keyring.config("trainer", **everywhere), tmp_path)
    with socket.socket() as again:
        again.bind(("0.0.0.0", keyring.port))
