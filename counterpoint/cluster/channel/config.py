"""What a channel is: its name, its bounds, and who puts into it. A role's `config` may hold one as a table."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from counterpoint.transport.config import Config, Identifier, TransportConfig
from counterpoint.transport.files.watched import Watched
from counterpoint.transport.wires.endpoint import IPC, CurveKeys, resolve_address, watched_keys


class ChannelConfig(Config):
    """One channel. Its host and its peers use the same values, except for their secret keys."""

    name: Identifier
    """The channel's name, unique in the job."""

    producers: tuple[str, ...] = Field(min_length=1)
    """The names of all workers that put into the channel. The stream ends when every one of them has ended."""

    capacity: int = Field(default=1024, ge=1)
    """Most records that are stored and not acknowledged. Others wait for room, up to 64 MB of each producer in the host."""

    max_record_bytes: int = Field(default=64 * 2**20, gt=0)
    """Largest record."""

    lease_seconds: float = Field(default=10.0, gt=0)
    """A peer that is silent for so long is counted as dead. One whose connection breaks is so at once."""

    max_deaths: int = Field(default=3, ge=1)
    """A record is set aside once so many processes have died at it: it was the first that each held, and none acknowledged any.
    The host logs and names it, keeps it in its journal, and the stream goes on without it."""

    directory: Path | None = None
    """The directory of the host's journal, so that its own death loses nothing; relative to the job's directory. Unset:
    it keeps the records in memory only."""

    sync: bool = False
    """Whether a record counts as stored only when it is on the disk, so that it survives the machine's crash, too."""

    address: str | None = None
    """`ipc://PATH` or `tcp://HOST:PORT`. Unset: a socket of the channel's name in the job's directory."""

    server_public_key_file: Path | None = None
    """CURVE public key of the host. Required at both ends for a `tcp://` address."""

    secret_key_file: Path | None = None
    """This end's CURVE secret key, likewise."""

    authorized_keys_directory: Path | None = None
    """The host's end: a directory with the CURVE public key (`*.key`) of every peer that may connect. Required with keys."""

    def transport(self) -> TransportConfig:
        """Returns what `transport.wires.endpoint` needs of it."""
        fields = ("address", "server_public_key_file", "secret_key_file", "authorized_keys_directory")
        return TransportConfig(**{field: getattr(self, field) for field in fields})

    def endpoint(self, job_directory: Path) -> tuple[str, Watched[CurveKeys] | None]:
        """Returns the address, and this end's keys, to be read again once they change.

        Raises `ValueError` for an address or keys that cannot be.
        """
        transport, place = self.transport(), job_directory / "channels" / self.name
        if self.address is None:
            place.mkdir(parents=True, exist_ok=True)
        address, keys = resolve_address(transport, place), watched_keys(transport)
        if keys is None and not address.startswith(IPC):
            raise ValueError(
                f"channel {self.name}: {address} needs CURVE keys: set server_public_key_file and secret_key_file (`counterpoint "
                "keys` makes them), or use ipc://"
            )
        return address, keys
