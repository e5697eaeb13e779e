"""A set of whole numbers that fills up from below: everything under a watermark, and few numbers above it.

The host of a channel knows by it which positions of a stream it has (`lending.py`), and a consumer which sequence numbers it
has committed. Its size is the number of gaps' neighbours, not of everything that was ever added.
"""

from __future__ import annotations

from collections.abc import Iterable


class PositionSet:
    """Numbers from 0 on. Adding and asking cost O(1), on the average over all calls."""

    def __init__(self, watermark: int = 0, above: Iterable[int] = ()) -> None:
        """Takes the lowest number that is missing, and the numbers above it that are not."""
        self._watermark = watermark
        self._above = set(above)
        self._close_gap()

    @property
    def watermark(self) -> int:
        """The lowest number that is missing."""
        return self._watermark

    @property
    def above(self) -> list[int]:
        """The numbers above the watermark, ascending."""
        return sorted(self._above)

    def __contains__(self, position: int) -> bool:
        return position < self._watermark or position in self._above

    def add(self, position: int) -> bool:
        """Adds a number. Returns whether it was missing."""
        if position in self:
            return False
        self._above.add(position)
        self._close_gap()
        return True

    def fill_below(self, floor: int) -> None:
        """Adds every number below `floor`."""
        while self._watermark < floor:
            if len(self._above) == 0:
                self._watermark = floor
                return
            self._above.discard(self._watermark)
            self._watermark += 1
        self._close_gap()

    def _close_gap(self) -> None:
        while self._watermark in self._above:
            self._above.discard(self._watermark)
            self._watermark += 1
