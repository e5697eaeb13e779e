"""Weights for use elsewhere: the files of a published adapter in PEFT's format, and the signed URLs to fetch them.

A URL is for one file until a time, and needs no key: the SDK fetches it without one. Files are encrypted by age
(https://age-encryption.org) when a client fetches them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlencode

import pyrage

from counterpoint.service.tinker.refusals import BadRequest

FILES = ("adapter_config.json", "adapter_model.safetensors")

AGE = ".age"
"""The end of encrypted files' names."""

MOST_RECIPIENTS = 10

URL_SECONDS = 3600.0
"""How long a URL is valid."""


def check_recipients(recipients: Sequence[str]) -> None:
    """Raises `BadRequest` unless these can be recipients of encrypted files: keys of age or SSH."""
    if len(recipients) > MOST_RECIPIENTS:
        raise BadRequest(f"age_encryption_recipients: {len(recipients)} are given; expected at most {MOST_RECIPIENTS}")
    for each in recipients:
        _recipient(each)


def _recipient(text: str) -> pyrage.x25519.Recipient | pyrage.ssh.Recipient:
    try:
        return (
            pyrage.x25519.Recipient.from_str(text) if text.startswith("age1") else pyrage.ssh.Recipient.from_str(text)
        )
    except pyrage.RecipientError as error:
        raise BadRequest(
            f"age_encryption_recipients: {text[:80]!r} is no recipient ({error}); expected age1... or an SSH public key"
        ) from error


class Signer:
    """Signs URLs of files, and checks them."""

    def __init__(self, secret: bytes) -> None:
        """`secret` is the service's, and the same after a restart."""
        self._secret = secret

    def query(self, path: str, file: str, expires: int) -> str:
        """Returns the query that fetches a file of the weights at `path` until `expires`, in seconds since 1970."""
        return urlencode({"file": file, "expires": expires, "signature": self._signature(path, file, expires)})

    def permits(self, path: str, file: str, expires: str, signature: str, now: float) -> bool:
        """Whether this signer made a query, and it is still valid."""
        if not expires.isdecimal() or len(expires) > 12 or int(expires) <= now:
            return False
        return hmac.compare_digest(self._signature(path, file, int(expires)).encode(), signature.encode())

    def _signature(self, path: str, file: str, expires: int) -> str:
        return hmac.new(self._secret, f"{path}\n{file}\n{expires}".encode(), hashlib.sha256).hexdigest()


def names_of(recipients: Sequence[str]) -> list[str]:
    """Returns the names by which clients fetch the files."""
    return [f"{name}{AGE}" if recipients else name for name in FILES]


def open_file(directory: str, name: str, recipients: Sequence[str]) -> tuple[BinaryIO, int]:
    """Opens a file of published weights, encrypted if there are recipients. Returns it and its bytes.

    Blocks: call it in a thread. Raises `OSError`.
    """
    file = (Path(directory) / name.removesuffix(AGE)).open("rb")
    if not recipients:
        return file, os.fstat(file.fileno()).st_size
    encrypted = tempfile.TemporaryFile()  # noqa: SIM115 - whoever asked closes it
    with file:
        pyrage.encrypt_io(file, encrypted, [_recipient(each) for each in recipients])
    size = encrypted.tell()
    encrypted.seek(0)
    return encrypted, size
