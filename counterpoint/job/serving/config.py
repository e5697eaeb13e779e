"""The configuration of `counterpoint serve` (`counterpoint/serve/main.py`), also as the `[serve]` section of a job file."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from counterpoint.transport.config import Config
from counterpoint.transport.loopback import host_in_url, is_loopback

WORKER_VARIABLE = "CLUSTER_SERVE_WORKER"
"""Set in a server that is a worker of a job: what it started would end with it."""


STATE = "serve"
"""The folder of the tokens and the audit log in a job's directory. Not in `control/`, which a job begins anew."""


class ServeConfig(Config):
    """The web page and the admin API."""

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `tls_certificate` and `tls_key`."""

    port: int = Field(default=8400, ge=0, le=65535)
    """TCP port. 0: any that is free."""

    names: list[str] = []
    """Further names under which browsers reach it, such as that of a reverse proxy: `counterpoint.example.org`. A request for
    another name is refused, so that no foreign page can reach it by pointing its own name here (DNS rebinding)."""

    state_directory: Path | None = None
    """The directory of the tokens and the audit log. Unset: `serve/` in the first job's directory."""

    token_file: Path | None = None
    """The token that may change. Unset: `admin.token` in `state_directory`. Made if it is missing; its mode must be 0600."""

    read_token_file: Path | None = None
    """The token that may only read. Unset: `read.token` in `state_directory`."""

    tls_certificate: Path | None = None
    """PEM file with the certificate and those that lead to its authority."""

    tls_key: Path | None = None
    """PEM file with the certificate's key."""

    requests_per_second: float = Field(default=500.0, gt=0)
    """Most requests of one client address on average; twice as many may come at once. Viewers behind a proxy are one client."""

    changes_per_minute: float = Field(default=120.0, gt=0)
    """Most changes of one client address on average."""

    @model_validator(mode="after")
    def _guarded_beyond_loopback(self) -> ServeConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        if self.tls_certificate is None and not is_loopback(self.host):
            raise ValueError(
                f"host = {self.host!r} can be reached from other machines, and tokens would cross the network in the clear: set "
                "tls_certificate and tls_key, or listen on 127.0.0.1 behind a proxy that has them"
            )
        return self


def flags_of(config: ServeConfig) -> list[str]:
    """Returns the flags of `counterpoint serve` for what is set in `config`, with absolute paths."""
    flags: list[str] = []
    for key in sorted(config.model_fields_set):
        value = getattr(config, key)
        if key == "names":
            flags += [f"--name={name}" for name in value]
        elif value is not None:
            flags.append(f"--{key.replace('_', '-')}={value.absolute() if isinstance(value, Path) else value}")
    return flags


def url_of(config: ServeConfig, port: int) -> str:
    """Returns the address of the page on this machine, at a port."""
    return f"{'https' if config.tls_certificate else 'http'}://{host_in_url(config.host)}:{port}/"


def token_files(config: ServeConfig, state: Path) -> tuple[Path, Path]:
    """Returns the files of the token that may change and of the one that may look; `state` has those that are not named."""
    return config.token_file or state / "admin.token", config.read_token_file or state / "read.token"


def links_of(address: str, files: tuple[Path, Path]) -> str:
    """Returns lines with what to open in a browser, tokens included: for a terminal alone. Raises `OSError`."""
    to_change, to_look = (f"{address}#token={file.read_text().strip()}" for file in files)
    return f"open one of these in a browser:\n  to look:   {to_look}\n  to change: {to_change}"
