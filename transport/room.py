"""Room that owners share, such as memory or connections, so that none can take all of it.

An owner may have as much as is free afterwards. So one alone has half, two have a third each, and however many ask for all that
they may, there is some left for another (Choudhury and Hahne, Dynamic Queue Length Thresholds for Shared-Memory Packet
Switches, 1998).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class Room:
    """Room of a size, in any unit."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held = Counter[Hashable]()

    def take(self, owner: Hashable, amount: int, *, is_due: bool = False) -> bool:
        """Takes some for an owner; returns False, and takes none, if it would have more than is then free.

        What `is_due` is taken in any case: others wait for it.
        """
        if not is_due and self._held[owner] + amount > self._size - self._held.total() - amount:
            return False
        self._held[owner] += amount
        return True

    def give_back(self, owner: Hashable, amount: int) -> None:
        """Gives back what was taken."""
        self._held[owner] -= amount
        if not self._held[owner]:
            del self._held[owner]

    def of(self, owner: Hashable) -> int:
        """Returns how much an owner has."""
        return self._held[owner]
