"""How a job's bundles, workers and nodes are called on Ray, and what Ray is asked for them. Pure; nothing here calls Ray.

Everything of a job on Ray is named, so that a later master, or a person, finds it again and removes it: the placement group
`<job>/<bundle>`, and in it the actors `<job>/<bundle>/<worker>/<incarnation>`. `<job>` is the job's name and a digest of its
directory: two users of one Ray cluster may call their jobs alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.base import Node
from counterpoint.cluster.backends.capacity import total_of
from counterpoint.cluster.spec import Resources

NAMESPACE = "counterpoint"
"""Ray's namespace of every job: a process has one namespace for placement groups, and the names begin with the job anyway."""

SMALLEST = {"memory": 1.0}
"""Asked for a bundle that needs nothing: Ray refuses an empty one."""

_ON_RAY = {"cpu": "CPU", "gpu": "GPU", "memory_bytes": "memory"}
_HERE = {name: ours for ours, name in _ON_RAY.items()}

_ID_CHARACTERS = 16
"""How many characters of a node's id are in an actor's name."""


@dataclass(frozen=True, slots=True)
class ActorName:
    """The name of an actor, in parts."""

    job: str
    bundle: str
    worker: str
    incarnation: int

    def __str__(self) -> str:
        """The name as Ray has it."""
        return f"{group_name(self.job, self.bundle)}/{self.worker}/{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> ActorName | None:
        """Returns the parts of a name; None for an actor that is not ours."""
        parts = text.split("/")
        if len(parts) != 4 or not parts[3].isdigit():
            return None
        return cls(parts[0], parts[1], parts[2], int(parts[3]))


def job_key(name: str, directory: Path) -> str:
    """Returns what stands for the job in the names of its actors and placement groups."""
    return f"{name}-{hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]}"


def group_name(job: str, bundle: str) -> str:
    """Returns the name of a bundle's placement group."""
    return f"{job}/{bundle}"


def group_bundles(needs: Iterable[Resources]) -> list[dict[str, float]]:
    """Returns the bundles of a placement group: one, with the needs of all its workers, so that it is on one node."""
    return [{_ON_RAY.get(name, name): amount for name, amount in total_of(needs).items()} or SMALLEST]


def actor_options(needs: Resources) -> dict[str, Any]:
    """Returns what an actor takes of its placement group."""
    return {
        "num_cpus": needs.cpu,
        "num_gpus": needs.gpu,
        "memory": needs.memory_bytes or None,
        "resources": {name: amount for name, amount in needs.custom.items() if amount > 0},
    }


def node_of(entry: Mapping[str, Any]) -> Node:
    """Translates an entry of `ray.nodes()`."""
    resources = {
        _HERE.get(name, name): float(amount)
        for name, amount in entry["Resources"].items()
        if not name.startswith("node:") and name != "object_store_memory"
    }
    return Node(node_name(entry), bool(entry["Alive"]), resources)


def node_name(entry: Mapping[str, Any]) -> str:
    """Returns the name of a node: its address and a part of its id, since nodes of one machine share an address.

    A node that comes back has another id, and so another name.
    """
    return f"{entry['NodeManagerAddress']}-{entry['NodeID'][:_ID_CHARACTERS]}"


def address_of(node: str) -> str:
    """Returns the address in a node's name."""
    return node.rpartition("-")[0]


def elsewhere(avoid: Sequence[str], entries: Iterable[Mapping[str, Any]]) -> list[dict[str, str]] | None:
    """Returns the label selector of a bundle that must not be on the nodes `avoid`; None without any that lives."""
    ids = [entry["NodeID"] for entry in entries if entry["Alive"] and node_name(entry) in avoid]
    return [{"ray.io/node-id": f"!in({','.join(ids)})"}] if ids else None
