"""The pool's loads of one name at one server, which tell the weights of an answer (`inference.loads`). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from counterpoint.inference.base import WeightUpdate
from counterpoint.inference.clients.client import ServerIdentity
from counterpoint.inference.loads import Origin

KEPT_LOADS = 512
"""The newest loads of a name with accepted answers. Keeps the numbers of up to twice as many."""


@dataclass(slots=True)
class OwnLoads:
    """The loads of one name at one process with accepted answers."""

    name: str
    follows: bool
    """Whether another run loads the weights, at any time: then all answers of the process are accepted."""
    versions: dict[tuple[str | None, int | None], int | None] = field(default_factory=dict)
    """The version of each load of the pool, by name and number, or None for weights that were there before."""
    instance: str | None = None
    """The serving process."""
    any_own: bool = False
    """Whether a load of the pool is among them."""
    found: tuple[str, str | None, int] | None = None
    """The weights found at a server that the pool loads nothing into: the process, the name and the load that it began with."""

    def at(self, instance: str) -> bool:
        """Returns whether the next load is the first one at this process."""
        if self.instance != instance:
            self.versions, self.instance, self.any_own = {}, instance, False
        return not self.any_own

    def add(self, adapter: str | None, number: int, version: int) -> tuple[str | None, int]:
        """Accepts a load from now on. Weights found there under another name are none of the run's."""
        if not self.any_own:
            self.versions = {each: found for each, found in self.versions.items() if each[0] == adapter}
        self.any_own = True
        self.versions[adapter, number] = version
        if len(self.versions) > 2 * KEPT_LOADS:  # no request lasts that long
            oldest = number - KEPT_LOADS
            self.versions = {each: known for each, known in self.versions.items() if (each[1] or 0) > oldest}
        return adapter, number

    def forget(self, load: tuple[str | None, int] | None) -> None:
        """Stops accepting a load that was not proven."""
        if load is not None:
            self.versions.pop(load, None)

    def accepts(self, origin: Origin) -> bool:
        """Whether only weights of the pool computed an answer, or only those found at a server that it loads nothing into."""
        if origin.instance != self.instance:
            return False
        numbers = range(origin.first, origin.last + 1)
        return self.follows or all((origin.name, number) in self.versions for number in numbers)

    def load_at(self, identity: ServerIdentity, update: WeightUpdate | None) -> tuple[str | None, int | None]:
        """Returns name and number of the load that a server has in place of `update`, or of foreign weights for None.

        Without a number it has no such adapter.
        """
        adapter = self.name if self.name in identity.adapters else None
        if update is not None:
            adapter = update.adapter
        return adapter, identity.weights if adapter is None else identity.adapters.get(adapter)

    def find(self, identity: ServerIdentity) -> tuple[int, int] | None:
        """Accepts a server's weights, if the pool loads none.

        Returns the numbers of the first load and of this one if they differ and this one is not accepted. The weights that a
        server started with are the same after a restart. If the name differs, the adapter was not there yet.
        """
        name, number = self.load_at(identity, None)
        load = number or 0
        found = (identity.instance if load else "", name, load)
        former = self.found
        if former is not None and former[1] == name and former != found and not self.follows:
            return former[2], load
        self.found, self.versions, self.instance = found, {(name, load): None}, identity.instance
        return None
