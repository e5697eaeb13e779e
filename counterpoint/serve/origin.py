"""Which requests a browser was led into by a foreign page: they are refused before anything else is looked at.

DNS rebinding: a foreign page lets its own name resolve to our address, so `Host` must be a name of ours. Cross-site requests: a
browser says where a request comes from in `Origin` and `Sec-Fetch-Site`; a program says neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from counterpoint.serve.errors import Forbidden
from counterpoint.transport.loopback import is_loopback

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def own_names(host: str, names: Iterable[str]) -> frozenset[str]:
    """Returns the names by which browsers may reach a server that listens on `host`."""
    local = LOOPBACK_NAMES if is_loopback(host) or host in ("0.0.0.0", "::") else ()
    return frozenset(name.lower().strip("[]") for name in (host, *local, *names))


def check_origin(headers: Mapping[str, str], own: frozenset[str], *, is_api: bool) -> None:
    """Raises `Forbidden` for a request that names another host, or that a foreign page has made."""
    host = headers.get("Host", "")
    if _name_of(host) not in own:
        raise Forbidden(
            f"this is not {host[:100]!r}", where="Host", value=host, expected=f"one of {', '.join(sorted(own))}",
            advice="a further name, such as a proxy's, is given with --name",
        )  # fmt: skip
    origin = headers.get("Origin")
    if origin is not None and _host_of(origin) != host.lower():
        raise Forbidden(
            "a page of another site may not use this", where="Origin", value=origin, expected=f"that of {host}"
        )
    if is_api and headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
        raise Forbidden("a page of another site may not use this", where="Sec-Fetch-Site", expected="same-origin")


def _host_of(origin: str) -> str | None:
    """Returns host and port of an `Origin`, in small letters; None if it has no such form."""
    scheme, separator, rest = origin.partition("://")
    return rest.lower() if separator and scheme in ("http", "https") else None


def _name_of(host: str) -> str | None:
    """Returns the name in a `Host` header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname if host and not set(host) & set("/?#@\\") else None
    except ValueError:
        return None
