"""The items of one run, taken in the order of their numbers, whenever they arrive. Pure: events in, instructions out.

If commits come after items, work on an item begins before its commit, which changes no weights, and counts with the commit of
this very item. If another item has the number by then, or none, the begun work is dropped: the run is as before it. For
example, item 3 begins, its orchestrator restarts and sends another item 3, and the first one is dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Due(Generic[Item]):
    """The next action on a run's items: first the dropping."""

    drops: bool = False
    """Whether to drop the begun work."""
    item: Item | None = None
    """The item with which to begin, or to go on, if there is one."""
    counts: bool = False
    """Whether the item counts: the trainer carries it out, and `end` or `drop` follows. If not, `refuse` may follow."""
    has_begun: bool = False
    """Whether the item has begun before it counted."""


class Order(Generic[Item]):
    """The order of one run's items. Times are of one monotonic clock, in seconds."""

    def __init__(self, done: int, now: float, *, committed: float = math.inf, last: float = math.inf) -> None:
        """Begins after item `done`. Items up to `committed` count. None after `last` is taken."""
        self.done = done
        """The last item that was carried out."""
        self.committed = committed
        self.waiting: dict[int, Item] = {}
        """The items that wait to be taken, by number."""
        self.taken: Item | None = None
        """The item in progress."""
        self.waited = 0.0
        """Seconds of waiting for the last taken item."""
        self.last = last
        self._idle_since = now
        self._begun: tuple[Item, float] | None = None
        """The begun item that does not count yet, and the time of its beginning."""
        self._refused: Item | None = None
        """The last item that could not begin before it counted."""

    @property
    def newest(self) -> int:
        """The number of the last taken item."""
        return self.done + (self.taken is not None)

    @property
    def open(self) -> int | None:
        """The number of the item in progress, or None if there is none."""
        return None if self.taken is None else self.newest

    @property
    def has_next(self) -> bool:
        """Whether the next item is there and counts."""
        return self.newest < min(self.committed, self.last) and self.newest + 1 in self.waiting

    @property
    def is_over(self) -> bool:
        """Whether the last item was carried out."""
        return self.done >= self.last

    def ask(self, number: int, item: Item) -> None:
        """Notes an item that an asker wants, in place of a waiting one of its number."""
        assert number > self.newest, f"item {number} was taken"
        self.waiting[number] = item

    def commit(self, number: int) -> None:
        """Notes that the items up to this one count."""
        self.committed = max(self.committed, number)

    def forget_uncommitted(self) -> None:
        """Forgets the items that do not count, since they may never."""
        self.waiting = {number: item for number, item in self.waiting.items() if number <= self.committed}

    def next(self, now: float) -> Due[Item]:
        """Returns the next action."""
        item = self.waiting.get(self.newest + 1)
        if self.taken is not None or self.is_over:
            return Due()
        drops = self._begun is not None and self._begun[0] is not item
        if drops:
            self._begun = None
        if item is not None and self.has_next:
            since = now if self._begun is None else self._begun[1]
            due = Due(drops, item, counts=True, has_begun=self._begun is not None)
            self.taken, self.waited = self.waiting.pop(self.newest + 1), since - self._idle_since
            self._begun = self._refused = None
            return due
        if item is None or self._begun is not None or self._refused is item:
            return Due(drops)
        self._begun = item, now
        return Due(drops, item)

    def refuse(self) -> None:
        """Notes that the next item cannot begin before it counts."""
        assert self._begun is not None
        self._refused, self._begun = self._begun[0], None

    def end(self, now: float) -> None:
        """Notes that the taken item is carried out."""
        assert self.taken is not None
        self.done, self.taken, self._idle_since = self.newest, None, now

    def drop(self) -> Item | None:
        """Notes that the item in progress is dropped, and is not carried out. Returns it, if there was one."""
        item = self._begun[0] if self._begun is not None else self.taken
        self.taken = self._begun = self._refused = None
        return item
