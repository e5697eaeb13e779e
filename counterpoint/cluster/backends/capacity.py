"""Compares what a job needs with what its nodes have, before anything starts, and chooses a node for a bundle. Pure.

`require_capacity` refuses what can never fit: more of a resource than all nodes have together, or a bundle that no single node
could hold. It does not search for a packing; a job that fits by both counts and still finds no place is refused by `allocate`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from counterpoint.cluster.backends.base import Bundle, Node
from counterpoint.cluster.errors import BackendError, CapacityError
from counterpoint.cluster.spec import Resources

_NOTHING = 1e-9
"""Fractions of a resource are added up; a difference below this is rounding."""


def total_of(needs: Iterable[Resources]) -> dict[str, float]:
    """Adds up needs, with the names that `Node.resources` has; what is not needed is left out."""
    total: defaultdict[str, float] = defaultdict(float)
    for one in needs:
        for name, amount in {**one.custom, "cpu": one.cpu, "gpu": one.gpu, "memory_bytes": one.memory_bytes}.items():
            total[name] += amount
    return {name: amount for name, amount in total.items() if amount > 0}


def require_capacity(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> None:
    """Raises `CapacityError` unless the living nodes can hold the bundles; the message names every resource that is short."""
    living = [node for node in nodes if node.alive]
    if not living:
        raise CapacityError("no node is alive; the job needs at least one")
    present: defaultdict[str, float] = defaultdict(float)
    for node in living:
        for name, amount in node.resources.items():
            present[name] += amount
    wanted = total_of(one for bundle in bundles for one in bundle.needs.values())
    if short := _shortfall(wanted, present):
        count = "1 node" if len(living) == 1 else f"{len(living)} nodes"
        raise CapacityError(f"the job does not fit: {short}, on {count} in total; ask for less, or add nodes")
    for bundle in bundles:
        require_place(bundle, living)


def require_place(bundle: Bundle, nodes: Sequence[Node]) -> None:
    """Raises `CapacityError` unless one of the nodes could hold the whole bundle if it were empty."""
    wanted = total_of(bundle.needs.values())
    shortfalls = {node.name: _shortfall(wanted, node.resources) for node in nodes if node.alive}
    if shortfalls and all(shortfalls.values()):
        nearest, short = min(shortfalls.items(), key=lambda entry: entry[1].count(";"))
        raise CapacityError(
            f"bundle {bundle.name} ({_some(list(bundle.needs))}) fits on no node: {short}, on the nearest node {nearest}; "
            "all its workers are placed on one node"
        )


def _shortfall(wanted: Mapping[str, float], present: Mapping[str, float]) -> str:
    """`cpu: wanted 8, present 4, missing 4; ...`; empty if there is enough of everything."""
    return "; ".join(
        f"{name}: wanted {_number(amount)}, present {_number(held)}, missing {_number(amount - held)}"
        for name, amount in sorted(wanted.items())
        if amount - (held := present.get(name, 0.0)) > _NOTHING
    )


def _number(amount: float) -> str:
    return str(int(amount)) if float(amount).is_integer() else f"{amount:g}"


def _some(workers: Sequence[str]) -> str:
    """A few names of many."""
    return ", ".join(workers[:4]) + (f" and {len(workers) - 4} more" if len(workers) > 4 else "")


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
