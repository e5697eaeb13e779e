"""Chooses a node for a bundle: all of its workers on one node, or none. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cluster.backends.base import Bundle, Node
from cluster.backends.capacity import require_place, total_of
from cluster.errors import BackendError

_NOTHING = 1e-9
"""As in `capacity`: rounding."""


def choose(
    bundle: Bundle, nodes: Sequence[Node], taken: Mapping[str, Sequence[Mapping[str, float]]], avoid: Iterable[str]
) -> str:
    """Returns the name of the node on which the bundle has the most room left; of equal ones, the one with the fewest bundles.

    `taken`: the totals of the bundles that are on each node already. Raises `CapacityError` if no node of the rest could ever
    hold it, `BackendError` if none can now.
    """
    living = [node for node in nodes if node.alive and node.name not in set(avoid)]
    require_place(bundle, living)
    if not living:
        raise BackendError(f"bundle {bundle.name} has no place: every node is set aside ({', '.join(avoid) or 'none'})")
    wanted = total_of(bundle.needs.values())
    free = {node.name: _free(node, taken.get(node.name, ())) for node in living}
    fitting = [
        node
        for node in living
        if all(free[node.name].get(name, 0.0) - amount > -_NOTHING for name, amount in wanted.items())
    ]
    if not fitting:
        short = "; ".join(
            f"{name}: wanted {amount:g}, free at most {max(held.get(name, 0.0) for held in free.values()):g}"
            for name, amount in sorted(wanted.items())
        )
        raise BackendError(f"bundle {bundle.name} has no place now: {short}")
    order = {node.name: position for position, node in enumerate(nodes)}
    return min(
        fitting,
        key=lambda node: (-_room(node, free[node.name]), len(taken.get(node.name, ())), order[node.name]),
    ).name


def _free(node: Node, taken: Iterable[Mapping[str, float]]) -> dict[str, float]:
    free = dict(node.resources)
    for total in taken:
        for name, amount in total.items():
            free[name] = free.get(name, 0.0) - amount
    return free


def _room(node: Node, free: Mapping[str, float]) -> float:
    """The smallest free part of any resource of the node."""
    return min((free[name] / held for name, held in node.resources.items() if held > 0), default=0.0)
