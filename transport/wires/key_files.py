"""Makes the files by which the roles of a job trust each other on several machines: CURVE keys of both ends, and a token.

The ends of the wire read them with `transport/wires/endpoint.py`, servers and their clients with
`counterpoint/inference/token.py`.
"""

from __future__ import annotations

import secrets
import stat
from pathlib import Path

import zmq

from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.wires.endpoint import load_pair, load_public

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

    A public key that is missing is made from its secret. Raises `UserError`, before anything is written, for a secret that
    others can read, and for a public key without its secret or with another one; `OSError`.
    """
    pairs = {TRAINER: TRAINER_SECRET, ORCHESTRATOR: ORCHESTRATOR_SECRET}
    for secret in (*pairs.values(), TOKEN):
        _check_secret(directory / secret)
    for public, secret in pairs.items():
        _check_pair(directory / public, directory / secret)
    missing = frozenset(name for name in PURPOSES if not (directory / name).exists())
    (directory / ORCHESTRATOR).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for public, secret in pairs.items():
        if secret in missing:
            write_atomically(directory / secret, certificate(*zmq.curve_keypair()), mode=0o600)
        if public in missing:
            write_atomically(directory / public, certificate(load_pair(directory / secret)[0]))
    if TOKEN in missing:
        write_atomically(directory / TOKEN, f"{secrets.token_urlsafe(32)}\n".encode(), mode=0o600)
    return missing


def certificate(public: bytes, secret: bytes | None = None) -> bytes:
    """Returns a certificate as `zmq.auth.loadcertificate` reads it."""
    lines = [b"metadata", b"curve", b'    public-key = "%s"' % public]
    if secret is not None:
        lines.append(b'    secret-key = "%s"' % secret)
    return b"\n".join((*lines, b""))


def _check_secret(path: Path) -> None:
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"{path.absolute()} has the mode {mode:04o}, so other users may know this secret; expected 0600. Remove the file, "
            "and the public key of a pair, to have new ones made, or, if nobody else has seen it, change its mode"
        )


def _check_pair(public: Path, secret: Path) -> None:
    """Raises `UserError` for a public key that is there without its secret, and for a secret that holds none."""
    if not secret.exists():
        if public.exists():
            raise UserError(
                f"{public.absolute()} is there without its secret key {secret.absolute()}, so nothing was made. If another "
                "machine has the secret, make further keys in another directory than this. If the secret is lost, remove "
                f"{public.absolute()} to have a new pair made, and give the new public key to whoever has this one"
            )
        return
    try:
        expected, _ = load_pair(secret)
        found = load_public(public) if public.exists() else expected
    except (OSError, ValueError) as error:
        raise UserError(
            f"{error}; restore the file. Remove {secret.absolute()} and {public.absolute()} to have a new pair made"
        ) from None
    if found != expected:
        raise UserError(
            f"{public.absolute()} is not the public key of {secret.absolute()}; remove the wrong one of them, or both to "
            "have a new pair made"
        )
