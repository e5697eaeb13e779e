"""How often a client may ask: a token bucket for each address, in memory that is bounded however many addresses there are."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

MOST_CLIENTS = 4096
"""Addresses that are remembered; the one that was silent longest is forgotten, and begins anew."""


class RateLimit:
    """Lets each client ask `rate` times a second on average, and `burst` times at once."""

    def __init__(self, rate: float, burst: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = rate, max(1.0, burst), clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What each client has left, and when."""

    def take(self, address: str) -> float:
        """Counts a request; returns 0, or the seconds after which the client may ask again if this one is too much."""
        now, client = self._clock(), _client_of(address)
        left, since = self._left.pop(client, (self._burst, now))
        left = min(self._burst, left + (now - since) * self._rate)
        is_allowed = left >= 1
        self._left[client] = (left - 1 if is_allowed else left), now
        if len(self._left) > MOST_CLIENTS:
            self._left.popitem(last=False)
        return 0.0 if is_allowed else (1 - left) / self._rate

    def __len__(self) -> int:
        """How many clients are remembered."""
        return len(self._left)


def _client_of(address: str) -> str:
    """Returns what counts as one client: an IPv4 address, or a network of 64 bits, which one machine may own, of IPv6."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    return str(parsed) if parsed.version == 4 else str(ipaddress.ip_network((parsed, 64), strict=False))
