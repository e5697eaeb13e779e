"""Which seat goes to which episode: groups are paired with groups. Decisions only, without I/O, tasks or a clock.

Seats of one group of a run have the same key, and episodes of one group of the host the same example. The seats of a key go to
episodes of one example as far as there are any, because the rewards of a group are compared with one another. But nobody waits
while there is a partner of any group.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict

REMEMBERED = 1024
"""Keys and examples whose last pairing is remembered; the least recently paired one is forgotten first."""

Pair = tuple[int, int]
"""An episode and a seat."""


class Matcher:
    """The episodes that wait for one seat of theirs, and those who wait to sit there. Never both wait."""

    def __init__(self) -> None:
        self._episodes: dict[int, dict[int, None]] = {}
        """Waiting episodes by example, both in the order of their arrival."""
        self._seats: dict[int, dict[int, None]] = {}
        """Waiting seats by key, likewise."""
        self._example_of: dict[int, int] = {}
        """The example that a key was paired with last."""
        self._keys: OrderedDict[int, int] = OrderedDict()
        """The keys in the order in which they were paired last, the most recent one at the end."""
        self._examples: OrderedDict[int, int] = OrderedDict()
        """The same of each example."""
        self._now = itertools.count()

    def add_episode(self, episode: int, example: int) -> list[Pair]:
        """Adds an episode; returns the pairs that can now be made, which no longer wait."""
        self._episodes.setdefault(example, {})[episode] = None
        return self._match()

    def add_seat(self, seat: int, key: int) -> list[Pair]:
        """Adds a seat, likewise."""
        self._seats.setdefault(key, {})[seat] = None
        return self._match()

    def remove_episode(self, episode: int, example: int) -> None:
        """Removes an episode, if it waits."""
        _remove(self._episodes, example, episode)

    def remove_seat(self, seat: int, key: int) -> None:
        """Removes a seat, if it waits."""
        _remove(self._seats, key, seat)

    def _match(self) -> list[Pair]:
        pairs: list[Pair] = []
        while self._episodes and self._seats:
            key, example = self._next()
            episode, seat = next(iter(self._episodes[example])), next(iter(self._seats[key]))
            _remove(self._episodes, example, episode)
            _remove(self._seats, key, seat)
            self._remember(key, example)
            pairs.append((episode, seat))
        return pairs

    def _next(self) -> tuple[int, int]:
        """Returns the key and the example to pair next.

        A key's own example first. Else those whose last pairing is the longest ago, if they had any: a key or an example that was
        paired just now belongs to a group whose others are on their way.
        """
        for key in self._seats:
            own = self._example_of.get(key)
            if own in self._episodes:
                return key, own
        return (
            min(self._seats, key=lambda key: self._keys.get(key, -1)),
            min(self._episodes, key=lambda example: self._examples.get(example, -1)),
        )

    def _remember(self, key: int, example: int) -> None:
        self._example_of[key] = example
        for recent, paired in ((self._keys, key), (self._examples, example)):
            recent[paired] = next(self._now)
            recent.move_to_end(paired)
        if len(self._keys) > REMEMBERED:
            self._example_of.pop(self._keys.popitem(last=False)[0])
        if len(self._examples) > REMEMBERED:
            self._examples.popitem(last=False)


def _remove(waiting: dict[int, dict[int, None]], group: int, member: int) -> None:
    if group in waiting and member in waiting[group]:
        del waiting[group][member]
        if not waiting[group]:
            del waiting[group]
