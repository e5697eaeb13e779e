"""Makes the files by which the roles of a job trust each other on several machines: CURVE keys of both ends, and a token.

The ends of the wire read them with `transport/wires/endpoint.py`, servers and their clients with `inference/token.py`.
"""

from __future__ import annotations

import secrets
import stat
import tempfile
from pathlib import Path

import zmq
import zmq.auth

from transport.errors import UserError
from transport.files.atomic import write_atomically

TOKEN = "token"
TRAINER, TRAINER_SECRET = "trainer.key", "trainer.key_secret"
ORCHESTRATOR, ORCHESTRATOR_SECRET = "authorized/orchestrator.key", "orchestrator.key_secret"

PURPOSES = {
    TRAINER: "trainer and orchestrators, transport.server_public_key_file",
    TRAINER_SECRET: "trainer, transport.secret_key_file",
    ORCHESTRATOR: f"trainer, transport.authorized_keys_directory = {Path(ORCHESTRATOR).parent.name!r}",
    ORCHESTRATOR_SECRET: "orchestrators, transport.secret_key_file",
    TOKEN: "servers and orchestrators, inference.api_key_file",
}
"""Each file in the directory: who needs it, and the key of the configuration that names it."""


def make_key_files(directory: Path) -> frozenset[str]:
    """Makes the files that are missing in `directory`, and returns their names; secrets have the mode 0600.

    A public key whose secret is missing is made anew with it, since nobody could use it. Raises `UserError`, before anything is
    written, for a secret that others can read, and for a public key that is missing or another than its secret's; `OSError`.
    """
    pairs = {TRAINER: TRAINER_SECRET, ORCHESTRATOR: ORCHESTRATOR_SECRET}
    for secret in (*pairs.values(), TOKEN):
        _check_secret(directory / secret)
    missing = {public: secret for public, secret in pairs.items() if not (directory / secret).exists()}
    for public, secret in pairs.items():
        if public not in missing:
            _check_pair(directory / public, directory / secret)
    (directory / ORCHESTRATOR).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for public, secret in missing.items():
        _make_pair(directory / public, directory / secret)
    made = {name for pair in missing.items() for name in pair}
    if not (directory / TOKEN).exists():
        write_atomically(directory / TOKEN, f"{secrets.token_urlsafe(32)}\n".encode(), mode=0o600)
        made.add(TOKEN)
    return frozenset(made)


def _make_pair(public: Path, secret: Path) -> None:
    """Writes the secret last: until it is there, the pair is not complete and is made again."""
    with tempfile.TemporaryDirectory(dir=secret.parent) as private:
        files = zmq.auth.create_certificates(private, "made")
        write_atomically(public, Path(files[0]).read_bytes())
        write_atomically(secret, Path(files[1]).read_bytes(), mode=0o600)


def _check_secret(path: Path) -> None:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"{path.absolute()} has the mode {mode:04o}, so other users may know this secret; expected 0600. Remove the file to "
            "have a new one made, or, if nobody else has seen it, change its mode"
        )


def _check_pair(public: Path, secret: Path) -> None:
    """Raises `UserError` unless both files are there and hold one pair."""
    try:
        known, _ = zmq.auth.load_certificate(public)
        _, private = zmq.auth.load_certificate(secret)
    except (OSError, ValueError) as error:
        raise UserError(f"{error}; restore it, or remove {secret.absolute()} to have a new pair made") from None
    if private is None or zmq.curve_public(private) != known:
        raise UserError(
            f"{public.absolute()} is not the public key of {secret.absolute()}; remove the secret to have a new pair made"
        )
