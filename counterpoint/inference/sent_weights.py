"""Weights that are sent to a server, for one that does not see the job's directory: which files these are, and their encoding.

The client offers them first, as JSON (`OFFER_PATH`), so that what a server cannot take is refused before it travels. The answer
names the files of a delta's base that the server holds: `{"holds": [names]}`. Then the client sends the others in one body
(`SEND_PATH`): the length of the offer, which says what is left out (4 bytes, little-endian), the offer, the files' bytes in its
order. The server checks the offer both times.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

import orjson

from counterpoint.inference.base import WeightUpdate
from counterpoint.inference.checkpoint import ADAPTER_FILES, BASE, DELTA, weight_files
from counterpoint.inference.loads import LoadClaim
from counterpoint.transport.files.atomic import STABLE

OFFER_PATH = "/counterpoint/v1/offer"
SEND_PATH = "/counterpoint/v1/send"

LENGTH_BYTES = 4
"""The size of the number before the JSON."""

MAX_IDENTITY = 128
"""Characters of a file's identity."""

MAX_OFFER_BYTES = 1 << 20
"""Longest JSON of an offer: room for thousands of files."""

_NAME = re.compile(r"(base/)?[A-Za-z0-9][A-Za-z0-9_.-]{0,127}\.safetensors|adapter_config\.json")
"""Names of files, none of which leads out of the directory that they are written to."""


@dataclass(frozen=True, slots=True)
class WeightOffer:
    """What is to be sent."""

    version: int
    adapter: str | None
    """Name of the LoRA adapter; None for full weights."""
    claim: LoadClaim
    """The run whose weights they are."""
    files: dict[str, int]
    """Bytes of each file, by its path in the published directory."""
    identities: dict[str, str] = field(default_factory=dict)
    """What tells each file of a delta's base from all others of its name, so that it comes once for several versions."""
    left_out: frozenset[str] = frozenset()
    """Files of the base that do not come, because the server holds them."""

    @property
    def coming(self) -> dict[str, int]:
        """Bytes of each file that comes."""
        return {name: nbytes for name, nbytes in self.files.items() if name not in self.left_out}

    @property
    def nbytes(self) -> int:
        """The size of all files that come."""
        return sum(self.coming.values())

    def encode(self) -> bytes:
        """Returns it as JSON."""
        return orjson.dumps({
            "version": self.version,
            "adapter": self.adapter,
            "claim": self.claim.encode(),
            "files": self.files,
            "identities": self.identities,
            "left_out": sorted(self.left_out),
        })  # fmt: skip

    def preamble(self) -> bytes:
        """Returns what comes before the files' bytes."""
        content = self.encode()
        return len(content).to_bytes(LENGTH_BYTES, "little") + content

    @classmethod
    def decode(cls, content: bytes) -> WeightOffer:
        """Reads what `encode` returned. Raises `ValueError` for anything else."""
        try:
            return cls._of(orjson.loads(content))
        except orjson.JSONDecodeError as error:
            raise ValueError(f"the offer is not JSON: {error}") from error

    @classmethod
    def _of(cls, fields: Any) -> WeightOffer:
        match fields:
            case {
                "version": int(version),
                "adapter": str() | None as adapter,
                "claim": claim,
                "files": dict(files),
                "identities": dict(identities),
                "left_out": list(left_out),
            } if files and type(version) is int:
                for name, nbytes in files.items():
                    if not _NAME.fullmatch(name) or type(nbytes) is not int or nbytes < 0:
                        raise ValueError(f"an offer has {name!r} of {nbytes!r} bytes; expected weights and their size")
                for name, identity in identities.items():
                    if name not in files or type(identity) is not str or len(identity) > MAX_IDENTITY:
                        raise ValueError(
                            f"an offer has the identity {identity!r} of {name!r}; expected a text, of a file in it"
                        )
                if not all(type(name) is str and name in identities for name in left_out):
                    raise ValueError("an offer leaves out files without an identity")
                return cls(version, adapter, LoadClaim.decode(claim), files, identities, frozenset(left_out))
        raise ValueError(
            "an offer is {version: integer, adapter: name or null, claim: {...}, files: {name: bytes, ...}, "
            "identities: {name: text}, left_out: [names]}"
        )


@contextmanager
def opened(update: WeightUpdate, claim: LoadClaim) -> Iterator[tuple[WeightOffer, dict[str, FileIO]]]:
    """Yields the offer of a published version to be loaded by `claim`, and its open files.

    They stay readable when the version is removed.

    Raises `OSError`, or `ValueError` if it is no published version.
    """
    directory = update.directory
    if not (directory / STABLE).is_file():
        raise ValueError(f"{directory} is not a published directory: it has no STABLE marker")
    if update.adapter is not None:
        paths = [directory / name for name in ADAPTER_FILES]
    else:
        paths = weight_files(directory) + ([directory / DELTA] if (directory / DELTA).exists() else [])
    with ExitStack() as stack:
        files = {str(path.relative_to(directory)): stack.enter_context(path.open("rb", buffering=0)) for path in paths}
        about = {name: os.fstat(file.fileno()) for name, file in files.items()}
        sizes = {name: found.st_size for name, found in about.items()}
        # Hard links of one file in several versions: a published file never changes.
        identities = {
            name: f"{found.st_dev:x}.{found.st_ino:x}.{found.st_mtime_ns:x}"
            for name, found in about.items()
            if name.startswith(f"{BASE}/")
        }
        yield WeightOffer(update.version, update.adapter, claim, sizes, identities), files
