"""Tells whether an address stays on this machine. Beyond it, the wire needs keys and HTTP needs a token."""

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
