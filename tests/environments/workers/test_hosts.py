"""Hosts: another machine's workers over TCP with keys, by real processes on this one."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
import zmq.auth

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.registry import load_environment
from counterpoint.environments.workers import hosts, pool, protocol
from counterpoint.environments.workers.host import HostConfig
from tests.environments.workers.playing import KIND, playing, wait_until
from tests.support.ports import free_port

pytestmark = pytest.mark.slow


class Machines:
    """The files and processes of one orchestrator and its hosts."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory, self.model = directory, model
        self.address = f"tcp://127.0.0.1:{free_port()}"
        for name in ("orchestrator", "host", "stranger"):
            zmq.auth.create_certificates(directory, name)
        authorized = directory / "authorized"
        authorized.mkdir()
        shutil.copy(directory / "host.key", authorized)

    @property
    def hosts(self) -> dict[str, str]:
        """The key `hosts` of the environment."""
        return {
            "address": self.address,
            "server_public_key_file": str(self.directory / "orchestrator.key"),
            "secret_key_file": str(self.directory / "orchestrator.key_secret"),
            "authorized_keys_directory": str(self.directory / "authorized"),
        }

    @contextmanager
    def host(self, key: str = "host", **environment: Any) -> Iterator[subprocess.Popen[bytes]]:
        """A host in a process of its own; its log is `host.log`."""
        fields = {"name": "mine", "kind": KIND, "workers": 1, "rollout_timeout_seconds": 60.0, **environment}
        lines = [
            f'address = "{self.address}"',
            f'server_public_key_file = "{self.directory}/orchestrator.key"',
            f'secret_key_file = "{self.directory}/{key}.key_secret"',
            f'model = "{self.model}"',
            f'directory = "{self.directory}/host"',
            "seed = 3",
            "[environment]",
            *(
                f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}"
                for name, value in fields.items()
            ),
        ]
        file = self.directory / "host.toml"
        file.write_text("\n".join(lines))
        command = [sys.executable, "-m", "counterpoint.cli.main", "env", "serve", str(file)]
        with (self.directory / "host.log").open("ab") as log, subprocess.Popen(command, stderr=log) as process:
            try:
                yield process
            finally:
                process.terminate()
                try:
                    process.wait(30)
                finally:
                    process.kill()

    def log(self) -> str:
        return (self.directory / "host.log").read_text()


@pytest.fixture
def machines(tmp_path: Path, model: Path) -> Machines:
    return Machines(tmp_path, model)


async def test_a_host_joins_plays_is_killed_and_comes_back(
    tmp_path: Path, model: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hosts, "SOON_SECONDS", 60.0)  # its worker starts slowly on a busy machine
    with machines.host() as first:
        async with playing(tmp_path, model, workers=0, hosts=machines.hosts) as each:
            rollout = await each.play("well")
            assert (rollout.error, rollout.reward, rollout.metrics) == (None, 2.0, {"turns": 2})
            assert rollout.state["started"] == "mine"
            assert bytes((await each.play("untrained")).turns[0].untrained) == b"\x00\x01\x01"
            assert "KeyError: 'the environment is broken'" in str((await each.play("raise")).error)
            assert "its worker 0 died: signal 9" in str((await each.play("kill")).error)
            assert (await each.play("well")).error is None, "the host started its worker again"
            hanging = asyncio.create_task(each.play("hang"))
            await wait_until(lambda: each.environment.take_metrics()["environment/mine/sessions"] == 1)
            monkeypatch.setattr(hosts, "SOON_SECONDS", 0.5)
            first.kill()
            assert "is lost: its connection broke" in str((await hanging).error)
            rollout = await each.play("well")
            assert "environment 'mine': no host has joined at tcp://127.0.0.1:" in str(rollout.error)
            with machines.host():
                await wait_until(lambda: each.pool.ready)
                assert (await each.play("well")).reward == 2.0
        assert "is lost: its connection broke; 1 of its rollouts fail with it" in caplog.text


async def test_sessions_go_elsewhere_when_a_host_is_lost(tmp_path: Path, model: Path, machines: Machines) -> None:
    async with playing(tmp_path, model, workers=1, hosts=machines.hosts) as each:
        with machines.host(workers=2) as host:
            await wait_until(lambda: each.pool.ready == 3)
            hanging = [asyncio.create_task(each.play("hang")) for _ in range(6)]
            await wait_until(lambda: len(each.servers.asked) == 6)
            assert [len(worker.sessions) for worker in each.pool.workers] == [2]
            host.send_signal(signal.SIGTERM)
            done, _ = await asyncio.wait(hanging, return_when=asyncio.FIRST_COMPLETED)
            await wait_until(lambda: sum(task.done() for task in hanging) == 4)
            assert (await each.play("well")).reward == 2.0
            for task in hanging:
                task.cancel()
            await asyncio.wait(hanging)
            assert done


async def test_who_has_no_key_or_another_environment_is_refused(
    tmp_path: Path, model: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool, "JOIN_SECONDS", 0.01)
    async with playing(tmp_path, model, workers=0, hosts=machines.hosts) as each:
        assert "no host has joined at tcp://127.0.0.1:" in caplog.text
        received: list[object] = []
        each.pool._hosts.wire._received = lambda *message: received.append(message)
        with machines.host(key="stranger"):
            await wait_until(lambda: "key is not among the orchestrator's authorized keys" in machines.log())
            await wait_until(lambda: "refused a peer without an authorized key" in caplog.text)
        with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.linger = 0
            failed = zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
            ended = plain.get_monitor_socket(failed | zmq.Event.DISCONNECTED)
            plain.connect(machines.address)
            plain.send(b"\x91\x92\x40\xa1x")
            await wait_until(lambda: ended.poll(0))
            plain.disable_monitor()
            ended.close()
        assert not received, "nothing of them was read"
        each.pool._hosts.wire._received = each.pool._hosts._received
        with machines.host(worker_sessions=7, rollout_timeout_seconds=5.0) as other:
            assert await asyncio.to_thread(other.wait, 60) != 0
        assert "its rollout_timeout_seconds is '5.0' at the host and '60.0' at the orchestrator" in machines.log()
        assert not each.pool.ready


def test_a_host_whose_environment_is_nested_nonsense_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    nested: list[Any] = []
    for _ in range(2000):
        nested = [nested]
    sent: list[Any] = []
    config = EnvironmentConfig.model_validate({"name": "mine", "kind": KIND})
    table = hosts.Hosts(config, lambda *_: None, lambda *_: None, lambda: None, lambda: None)
    table.wire = SimpleNamespace(send=lambda peer, message: sent.append((peer, message)))  # type: ignore[assignment]
    table._identity = {"kind": '"ours"'}
    table._received(b"peer", [protocol.JOIN, "host", {"kind": nested}])
    assert sent == [(b"peer", [protocol.REFUSED, "its kind is a list at the host and '\"ours\"' at the orchestrator"])]
    assert not list(table)
    assert "refused the host host" in caplog.text


def test_what_cannot_be_used_is_refused_at_the_start(tmp_path: Path, model: Path, machines: Machines) -> None:
    environment = {"name": "mine", "kind": KIND}
    fields: dict[str, Any] = {"model": model, "directory": tmp_path, "environment": environment, **machines.hosts}
    del fields["authorized_keys_directory"]
    with pytest.raises(ValueError, match="a host needs workers = 1 or more"):
        HostConfig.model_validate(fields)
    hosts = machines.hosts | {"secret_key_file": str(tmp_path / "host.key_secret")}
    loaded = load_environment(EnvironmentConfig.model_validate({**environment, "hosts": hosts}))
    with pytest.raises(ValueError, match=r"environment 'mine': hosts: .*the two are one pair"):
        asyncio.run(_start(loaded, tmp_path, model))


async def _start(environment: Any, directory: Path, model: Path) -> None:
    from counterpoint.environments.base import EnvironmentContext

    try:
        await environment.start(EnvironmentContext("mine", directory, model, 0))
    finally:
        await environment.close()


def test_a_host_may_have_its_token_elsewhere() -> None:
    def ends_with(directory: str, name: str) -> dict[str, str]:
        judge = {"kind": "judge", "api_key_file": f"{directory}/token", "name": name}
        config = EnvironmentConfig(name="toy", kind="reverse-text", args={"rubric": {"parts": [judge]}})
        return hosts.identity_of(config, 0, 1, False, None)

    assert ends_with("/etc/counterpoint", "a") == ends_with("/run/secrets", "a") != ends_with("/run/secrets", "b")
