"""Shares the servers' places between keys, in calls and tokens: the next call, and each key's number of calls. Pure.

The servers have `places` for that many calls at once. A key may hold at most `SHARE` times as many as are free: alone it has
most of them, several busy keys have equally many, and a place is always left for a new one. For example, of 100 places one key
gets 80, and two get 44 each. Source: Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
IEEE/ACM Transactions on Networking 6(2), 1998.

Among the keys that may have one, a place goes to the one that has paid the fewest tokens. A key that was away has saved none. A
call pays the tokens that it may take when it begins, and gets back the rest at its end. Source: Goyal, Vin and Cheng,
"Start-Time Fair Queueing", IEEE/ACM Transactions on Networking 5(5), 1997.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

SHARE = 4
"""The places that a key may hold for each that is free. One key alone has four fifths of all."""


@dataclass(eq=False, slots=True)
class WaitingCall:
    """A call to the servers that waits for a place, or has one."""

    key: str
    tokens: int
    """The tokens that it may take, with its prompt."""
    withdrawn: bool = False


@dataclass(slots=True)
class _Key:
    paid: float = 0.0
    """Tokens, counted on from the others' at its arrival."""
    held: int = 0
    """Its places."""
    waiting: list[tuple[int, int, WaitingCall]] = field(default_factory=list)
    """A heap by the numbers of requests, then by arrival."""
    withdrawn: int = 0
    """The number of withdrawn ones among these."""

    def first(self) -> WaitingCall | None:
        """Returns the next call."""
        while self.waiting and self.waiting[0][2].withdrawn:
            heapq.heappop(self.waiting)
            self.withdrawn -= 1
        return self.waiting[0][2] if self.waiting else None


class Shares:
    """The calls of all keys."""

    def __init__(self, places: int = 1, *, alone: bool = False) -> None:
        """`alone`: there is one key, which may have every place."""
        self.places = places
        self._alone = alone
        self._keys: dict[str, _Key] = {}
        self._asked = 0
        self._held = 0
        self._now = 0.0
        """The tokens that the last served key had paid before."""

    def ask(self, key: str, number: int, tokens: int) -> WaitingCall:
        """Notes a call that waits for a place.

        A key's calls wait by the `number` of their request, then in order of arrival.
        """
        call, mine = WaitingCall(key, tokens), self._keys.setdefault(key, _Key())
        if mine.first() is None:
            mine.paid = max(mine.paid, self._now)
        self._asked += 1
        heapq.heappush(mine.waiting, (number, self._asked, call))
        return call

    def withdraw(self, call: WaitingCall) -> None:
        """Forgets a call that waits."""
        call.withdrawn, mine = True, self._keys[call.key]
        mine.withdrawn += 1
        if 2 * mine.withdrawn > len(mine.waiting):
            mine.waiting = [each for each in mine.waiting if not each[2].withdrawn]
            mine.withdrawn = 0
            heapq.heapify(mine.waiting)

    def end(self, call: WaitingCall, tokens: int) -> None:
        """Takes back the place of a call that has taken `tokens`."""
        mine = self._keys[call.key]
        mine.held -= 1
        self._held -= 1
        mine.paid += tokens - call.tokens

    def begin(self) -> list[WaitingCall]:
        """Gives free places to calls, and returns these."""
        begun: list[WaitingCall] = []
        while (mine := self._next()) is not None:
            call = heapq.heappop(mine.waiting)[2]
            self._now = max(self._now, mine.paid)
            mine.paid += call.tokens
            mine.held += 1
            self._held += 1
            begun.append(call)
        return begun

    def _next(self) -> _Key | None:
        free = self.places - self._held
        if free <= 0:
            return None
        found: _Key | None = None
        for mine in self._keys.values():
            if mine.first() is None or (found is not None and found.paid <= mine.paid):
                continue
            if self._alone or not mine.held or mine.held + 1 <= SHARE * (free - 1):
                found = mine
        return found
