"""Tells whether an address stays on this machine, and how a URL names it. Beyond it, the wire needs keys and HTTP a token."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether `host` cannot be reached from another machine. A name other than `localhost` counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
"""Hosts by which a server listens on every address of its machine, and how its own machine reaches it."""


def host_in_url(host: str) -> str:
    """Returns how a URL, read on this machine, names what listens on `host`."""
    return WILDCARD_HOSTS.get(host, f"[{host}]" if ":" in host else host)
