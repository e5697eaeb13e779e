"""What an agent is started with, and what it then announces of itself.

The starter writes the settings as JSON into the agent's command line (`main.py`); the agent writes its endpoint, whole or not
at all, to `<directory>/<name>.json`, where its starter, and any later master on the machine, finds it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

MAX_ENDPOINT_BYTES = 64 * 1024


class AgentSettings(Config):
    """The settings of one agent."""

    agent: Identifier
    """Its own id, new for every agent."""
    job: Identifier
    """The id of the job."""
    node: Identifier
    """The node's name, as the master knows it."""
    name: Identifier
    """What its files are called; one agent of a name lives at a time. The node's own name if it has one agent only."""
    directory: Path
    """The directory of its endpoint, its lock and its log, on this machine, and this user's."""
    lease_seconds: float = Field(default=10.0, ge=1.0)
    """How long it goes on without a master."""
    listen: str = "ipc"
    """`ipc`, or `tcp://HOST`: it then takes any free port. Beyond loopback it needs `master_key`."""
    master_key: str = Field(default="", pattern=r"^(.{40})?$")
    """The CURVE public key of the master, Z85, which alone may connect. Empty: anyone who can reach the socket."""
    announce: bool = False
    """Whether it also prints its endpoint, one line of JSON, once it listens."""
    parent: int = Field(default=0, ge=0)
    """A process with which the agent dies, and everything below it. 0: none; it survives its starter."""

    @property
    def mark(self) -> str:
        """What all its processes have in their environment (`protocol.MARK`)."""
        return mark_of(self.directory, self.name)

    @property
    def endpoint_file(self) -> Path:
        """The file in which the agent announces itself."""
        return endpoint_file(self.directory, self.name)

    @property
    def log_file(self) -> Path:
        """The agent's own log."""
        return self.directory / f"{self.name}.log"


class AgentEndpoint(Config):
    """The endpoint at which an agent takes commands."""

    agent: Identifier
    """The id of the agent."""
    node: Identifier
    """The name of the node."""
    pid: int = Field(gt=0)
    """Its process, on its own machine."""
    started: float = Field(ge=0)
    """The time when that process started (`remains.start_of`), which no other process of the same id has."""
    address: str
    """The agent's ZMQ address."""
    server_key: str = Field(default="", pattern=r"^(.{40})?$")
    """Its CURVE public key, Z85; empty without keys."""


def mark_of(directory: Path, name: str) -> str:
    """Returns the mark of the agents of that name, one after the other."""
    return f"{directory.resolve()}:{name}"


def endpoint_file(directory: Path, name: str) -> Path:
    """Returns where an agent announces itself."""
    return directory / f"{name}.json"


def lock_file(directory: Path, name: str) -> Path:
    """Returns the lock that an agent holds while it lives."""
    return directory / f"{name}.lock"


def read_endpoint(directory: Path, name: str) -> AgentEndpoint | None:
    """Returns what the last agent of that name announced; None if none did, or the file is not whole."""
    try:
        return AgentEndpoint.model_validate(read_json(endpoint_file(directory, name), MAX_ENDPOINT_BYTES))
    except (OSError, UntrustedFileError, ValidationError):
        return None
