"""Keys that an operator changes while both ends run."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq.auth

from counterpoint.transport.files import watched
from counterpoint.transport.messages import Hello, Ready
from counterpoint.transport.wires.base import BatchReceiver
from counterpoint.transport.wires.open import open_link, open_receiver
from tests.support.polling import until
from tests.transport.ends import SESSION, hear
from tests.transport.wires.test_endpoint import Keyring


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "LOOK_SECONDS", 0.02)


@contextmanager
def trainer(keyring: Keyring) -> Iterator[BatchReceiver]:
    """A trainer that answers every Hello."""
    receiver, ended = open_receiver(keyring.config("trainer"), keyring.directory), threading.Event()

    def serve() -> None:
        while not ended.is_set():
            if (received := receiver.receive(0.05)) is not None and isinstance(received[1], Hello):
                receiver.send(received[0], Ready(1, 4, SESSION))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield receiver
    finally:
        ended.set()
        thread.join()
        receiver.close()


@pytest.mark.slow
async def test_a_removed_key_is_cut_off_and_comes_back_with_it(
    keyring: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    key, aside = keyring.authorized / "orchestrator.key", keyring.directory / "aside"
    with trainer(keyring):
        link = open_link(keyring.config("orchestrator"), keyring.directory)
        await link.start(Hello("default", 0))
        assert isinstance(await hear(link), Ready)
        key.rename(aside)  # the last one: the directory is empty
        await until(lambda: "the CURVE key is not among" in caplog.text, "a refusal of the removed key")
        aside.rename(key)
        assert isinstance(await hear(link), Ready)
        await link.close()


@pytest.mark.slow
async def test_an_orchestrators_new_key_is_used_once_the_trainer_knows_it(keyring: Keyring) -> None:
    with trainer(keyring):
        link = open_link(keyring.config("orchestrator"), keyring.directory)
        await link.start(Hello("default", 0))
        assert isinstance(await hear(link), Ready)
        zmq.auth.create_certificates(keyring.directory, "renewed")
        shutil.copy(keyring.directory / "renewed.key", keyring.authorized)
        (keyring.directory / "renewed.key_secret").rename(keyring.directory / "orchestrator.key_secret")
        (keyring.authorized / "orchestrator.key").unlink()  # ends the connection
        assert isinstance(await hear(link), Ready)
        await link.close()


@pytest.mark.slow
async def test_a_trainers_new_pair_is_used_once_both_files_are_there(
    keyring: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer(keyring):
        link = open_link(keyring.config("orchestrator"), keyring.directory)
        await link.start(Hello("default", 0))
        assert isinstance(await hear(link), Ready)
        (new := keyring.directory / "new").mkdir()
        zmq.auth.create_certificates(new, "trainer")
        (new / "trainer.key_secret").rename(keyring.directory / "trainer.key_secret")
        await until(lambda: "is not the secret of" in caplog.text, "a look at half a pair")
        (new / "trainer.key").rename(keyring.directory / "trainer.key")
        assert isinstance(await hear(link), Ready)
        await link.close()
