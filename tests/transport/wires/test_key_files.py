"""The keys that one command makes: both ends take them, and nobody else can read them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import zmq.auth

from counterpoint.cli.main import main
from counterpoint.inference.token import read_token
from counterpoint.transport.config import TransportConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.wires.endpoint import load_authorized_keys, load_keys
from counterpoint.transport.wires.key_files import (
    ORCHESTRATOR,
    ORCHESTRATOR_SECRET,
    PURPOSES,
    TRAINER,
    TRAINER_SECRET,
    make_key_files,
)

SECRETS = ("trainer.key_secret", "orchestrator.key_secret", "token")


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_both_ends_take_the_keys_that_are_made(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "keys"
    assert make_key_files(directory) == PURPOSES.keys() == contents(directory).keys()
    trainer = TransportConfig(
        server_public_key_file=directory / "trainer.key",
        secret_key_file=directory / "trainer.key_secret",
        authorized_keys_directory=directory / "authorized",
    )
    orchestrator = TransportConfig(
        server_public_key_file=directory / "trainer.key", secret_key_file=directory / "orchestrator.key_secret"
    )
    ends = load_keys(trainer), load_keys(orchestrator)
    assert ends[0] is not None
    assert ends[1] is not None
    assert load_authorized_keys(trainer, ends[0]) == {ends[1].public}
    assert ends[1].server_public == ends[0].public
    assert len(read_token(directory / "token", "api_key_file")) >= 40
    for name in SECRETS:
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600


def test_what_is_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_key_files(tmp_path)
    before = contents(tmp_path)
    assert main(["keys", str(tmp_path)]) == 0
    assert contents(tmp_path) == before
    said = capsys.readouterr().out
    assert all(f"kept  {tmp_path / name}: " in said for name in PURPOSES)
    assert not any(
        secret.decode() in said for name, text in before.items() if name in SECRETS for secret in text.split()[-1:]
    )


@pytest.mark.parametrize(("public", "secret"), [(TRAINER, TRAINER_SECRET), (ORCHESTRATOR, ORCHESTRATOR_SECRET)])
def test_a_public_key_whose_secret_is_elsewhere_is_an_error(tmp_path: Path, public: str, secret: str) -> None:
    """The other end's machine has the public key alone."""
    make_key_files(tmp_path / "here")
    there = tmp_path / "there" / public
    there.parent.mkdir(parents=True)
    there.write_bytes((tmp_path / "here" / public).read_bytes())
    before = contents(tmp_path)
    with pytest.raises(UserError) as refused:
        make_key_files(tmp_path / "there")
    assert str(there) in str(refused.value)
    assert str(tmp_path / "there" / secret) in str(refused.value)
    assert contents(tmp_path) == before, "nothing is written"


@pytest.mark.parametrize(("public", "secret"), [(TRAINER, TRAINER_SECRET), (ORCHESTRATOR, ORCHESTRATOR_SECRET)])
def test_a_missing_public_key_is_made_from_its_secret(tmp_path: Path, public: str, secret: str) -> None:
    """A kill between the two files leaves this."""
    make_key_files(tmp_path)
    before = contents(tmp_path)
    key, _ = zmq.auth.load_certificate(tmp_path / public)
    (tmp_path / public).unlink()
    assert make_key_files(tmp_path) == {public}
    assert zmq.auth.load_certificate(tmp_path / public) == (key, None)
    after = contents(tmp_path)
    assert {name: after[name] for name in before if name != public} == {
        name: text for name, text in before.items() if name != public
    }


@pytest.mark.parametrize("secret", ["~" * 40, "short", ""])
def test_a_secret_that_is_none_is_an_error(tmp_path: Path, secret: str) -> None:
    make_key_files(tmp_path)
    path = tmp_path / TRAINER_SECRET
    text = path.read_text()
    key = text.partition("secret-key")[2].split('"')[1]
    path.write_text(text.replace(key, secret))
    with pytest.raises(UserError, match=f"{path} "):
        make_key_files(tmp_path)


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_that_others_can_read_is_an_error(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_key_files(tmp_path)
    (tmp_path / name).chmod(0o640)
    (tmp_path / TRAINER).unlink()
    before = contents(tmp_path)
    assert main(["keys", str(tmp_path)]) == 2
    assert f"{tmp_path / name} has the mode 0640" in capsys.readouterr().err
    assert contents(tmp_path) == before, "nothing is written"


def test_a_public_key_of_another_secret_is_an_error(tmp_path: Path) -> None:
    make_key_files(tmp_path)
    (tmp_path / TRAINER).write_bytes((tmp_path / ORCHESTRATOR).read_bytes())
    with pytest.raises(UserError, match=f"{tmp_path}/trainer.key is not the public key of"):
        make_key_files(tmp_path)
