"""`[alerts]` of a job's file: the address that is told of problems, as they begin and end, and of the job's end."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from counterpoint.transport.config import Config
from counterpoint.transport.files.untrusted import read_text
from counterpoint.transport.loopback import is_loopback

MAX_HEADER_BYTES = 65536

MOST_URL_BYTES = 4096


class AlertsConfig(Config):
    """A webhook that gets a POST with JSON when a problem begins, when it ends, and when the job ends."""

    url: str | None = None
    """The address, of `https`; on this machine also of `http`. One that is a secret by itself, as Slack's, goes into
    `url_file`: this one is in `job.json` and on a command line."""

    url_file: Path | None = None
    """Or a file that holds the address, readable by its owner alone."""

    headers_file: Path | None = None
    """A file with a header for it a line, `Authorization: Bearer ...`, readable by its owner alone."""

    severities: list[Literal["error", "warning"]] = Field(default=["error"], min_length=1)
    """The severities of the problems that it is told of. It is always told of the job's end."""

    page: str | None = None
    """The address of the page for links, as people reach it: `https://counterpoint.example.org/`. Unset: that of `[serve]`,
    if it listens on one address or has a name."""

    per_minute: float = Field(default=10.0, gt=0, le=600)
    """Most messages of problems on average, and at once. Others wait, and go without a message if they are over by then."""

    @field_validator("url")
    @classmethod
    def _is_safe(cls, value: str | None) -> str | None:
        return value if value is None else checked_url(value, "url")

    @field_validator("page")
    @classmethod
    def _is_page(cls, value: str | None) -> str | None:
        if value is not None and (urlsplit(value).scheme not in ("http", "https") or not urlsplit(value).hostname):
            raise ValueError("expected an address such as https://counterpoint.example.org/")
        return value

    @model_validator(mode="after")
    def _has_one_address(self) -> AlertsConfig:
        if (self.url is None) == (self.url_file is None):
            raise ValueError("url and url_file: expected one of them")
        return self


def read_headers(path: str | None) -> dict[str, str]:
    """Returns the headers of the file, a line each. Raises `ValueError`, which does not quote them, for anything else."""
    if path is None:
        return {}
    if Path(path).stat().st_mode & 0o077:
        raise ValueError(f"{path} can be read by others; expected mode 0600")
    headers = {}
    for number, line in enumerate(read_text(path, MAX_HEADER_BYTES).splitlines(), start=1):
        name, colon, value = line.partition(":")
        if line.strip() and not (colon and name.strip()):
            raise ValueError(f"{path}, line {number}: expected `Name: value`")
        if line.strip():
            headers[name.strip()] = value.strip()
    return headers


def checked_url(url: str, where: str) -> str:
    """Returns an address that alerts may go to. Raises `ValueError`, which names `where` and does not quote it."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError(f"{where} holds no address; expected one such as https://hooks.example.org/alerts") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or any(letter.isspace() for letter in url):
        raise ValueError(f"{where} holds no address; expected one such as https://hooks.example.org/alerts")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise ValueError(f"{where} is of http, which others on the way can read; expected https")
    if parts.username is not None or parts.password is not None:
        raise ValueError(f"{where} holds a password; put it into headers_file")
    return url


def address_of(url: str | None, url_file: str | Path | None) -> str:
    """Returns the address. Raises `ValueError` or `OSError`, which do not quote it, for a file that does not hold one."""
    if url_file is None:
        return checked_url(url or "", "url")
    where = f"url_file {url_file}"
    if Path(url_file).stat().st_mode & 0o077:
        raise ValueError(f"{where} can be read by others; expected mode 0600")
    return checked_url(read_text(Path(url_file), MOST_URL_BYTES).strip(), where)
