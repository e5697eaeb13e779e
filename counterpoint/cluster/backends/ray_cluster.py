"""The calls of Ray that the backend needs: nodes, placement groups, and the detached actors of workers. All of them block.

So they run `in_thread`, beside the event loop: each in a daemon thread, with a name and a deadline. A thread of a pool would keep
the process from ending while a call hangs, and Ray's first connection to a dead address never ends. Ray is imported at the first
of them: it is an extra, and its import must not be in the main thread, where it would take SIGTERM for itself.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from counterpoint.cluster.backends.base import Node
from counterpoint.cluster.backends.ray_actor import WorkerActor
from counterpoint.cluster.backends.ray_places import (
    NAMESPACE,
    actor_options,
    elsewhere,
    group_bundles,
    node_name,
    node_of,
)
from counterpoint.cluster.errors import BackendError, ClusterError
from counterpoint.cluster.remains import clear_dead
from counterpoint.cluster.spec import Resources

ADDRESS = "RAY_ADDRESS"
"""Ray's own variable: where its cluster is, unless the spec says."""

CONNECT_SECONDS = 5.0
"""How long the address may take to accept a connection, before Ray is asked, which would try for ever."""

Given = ParamSpec("Given")
Result = TypeVar("Result")

_connecting = threading.Lock()
_connections = 0
"""How many `RayCluster`s of this process share its one connection."""
_connected_to = ""


def keep_connection(address: str) -> None:
    """Has this process, an actor's, keep the connection that it was started with."""
    global _connections, _connected_to
    with _connecting:
        _connections, _connected_to = 1, address


class RayCluster:
    """A connection to a Ray cluster; one process has one, so several of these share it."""

    def __init__(self, address: str = "", starts_local: bool = False) -> None:
        """Does not connect yet. Without `address`, `$RAY_ADDRESS` has it; without both, a Ray of this machine may be started."""
        self.address = address or os.environ.get(ADDRESS, "")
        self._starts_local = starts_local and not self.address

    def connect(self) -> None:
        """Connects this process. Raises as `require` and `probe` do, `BackendError` if it is refused, and whatever Ray raises."""
        self.require()
        import ray

        global _connections, _connected_to
        with _connecting:
            if not ray.is_initialized():
                if self.address:
                    self.probe()
                logging.getLogger("ray").setLevel(logging.ERROR)
                try:
                    ray.init(self.address or "local", namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
                except ConnectionError as error:  # Ray does not say that the cluster asks for a token
                    raise BackendError(
                        f"the Ray cluster at {self.address} refuses this process: {error}. If it asks for a token, as `ray "
                        "start` makes it where ~/.ray/auth_token exists, set RAY_AUTH_MODE=token for the command and all nodes"
                    ) from error
                _connected_to = self.address
            elif _connected_to != self.address:
                raise BackendError(f"this process is connected to Ray at {_connected_to or 'another address'} already")
            _connections += 1

    def require(self) -> None:
        """Raises `BackendError` without Ray, or without an address. Does not import Ray."""
        if importlib.util.find_spec("ray") is None:
            raise BackendError("ray is not installed; install the extra: pip install 'counterpoint[ray]'")
        if not self.address and not self._starts_local:
            raise BackendError(
                f"no address of a Ray cluster is given; set {ADDRESS} to HOST:PORT, as `ray start --head` prints it"
            )

    def probe(self) -> None:
        """Raises `BackendError` unless something accepts a connection at the address."""
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except (OSError, ValueError) as error:
            raise BackendError(
                f"nothing answers at the address of the Ray cluster, {self.address}: {error}; start one with `ray start --head`, "
                f"or set {ADDRESS} to that of one that runs, HOST:PORT"
            ) from None

    def disconnect(self) -> None:
        """Disconnects this process. Actors and placement groups stay: they are detached."""
        import ray

        global _connections
        with _connecting:
            _connections -= 1
            if _connections == 0:
                ray.shutdown()

    def nodes(self) -> list[Node]:
        """Returns every node that is or was in the cluster."""
        import ray

        return [node_of(entry) for entry in ray.nodes()]

    def reserve(self, group: str, needs: Sequence[Resources], avoid: Sequence[str], seconds: float) -> None:
        """Makes a detached placement group of that name; the one there is stays, unless it is on a node to `avoid`.

        Raises `BackendError` if it has no place within `seconds`; then there is no group.
        """
        import ray
        from ray.util.placement_group import placement_group

        entries = ray.nodes()
        known = {entry["NodeID"]: entry for entry in entries}
        found = self._group(group)
        if found is not None:
            held = [known.get(node) for node in self._table(found)["bundles_to_node_id"].values()]
            if any(entry is None or not entry["Alive"] or node_name(entry) in avoid for entry in held):
                self.remove_group(group)
                found = None
        if found is None:
            found = placement_group(
                group_bundles(needs),
                strategy="STRICT_PACK",
                name=group,
                lifetime="detached",
                bundle_label_selector=elsewhere(avoid, entries),
            )
        if not found.wait(seconds):
            state = self._table(found)["stats"].get("scheduling_state", "unknown")
            self.remove_group(group)
            raise BackendError(
                f"placement group {group} has no place after {seconds:g} s ({state}): it needs {group_bundles(needs)[0]} on one "
                f"node, and {ray.available_resources()} are free in all"
            )

    def remove_group(self, group: str) -> None:
        """Removes a placement group by name, with the actors in it; nothing if there is none."""
        from ray.util.placement_group import remove_placement_group

        if (found := self._group(group)) is not None:
            remove_placement_group(found)

    def start_actor(self, name: str, group: str, needs: Resources, lease_seconds: float) -> Any:
        """Creates the detached actor of that name in its placement group; one that lives stays as it is. Returns its handle."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        found = self._group(group)
        if found is None:
            raise BackendError(f"placement group {group} of actor {name} is gone; its bundle must be allocated again")
        options = ray.remote(WorkerActor).options(
            name=name,
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(found),
            **actor_options(needs),
        )
        return options.remote(name, lease_seconds)

    def actor(self, name: str) -> Any:
        """Returns the handle of the actor of that name. Raises `BackendError` if there is none."""
        import ray

        try:
            return ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            raise BackendError(f"actor {name} is gone") from None

    def clear(self, node: str, job: str, condemned: str, seconds: float) -> list[int]:
        """Kills on a node what the job's dead actors left, as `clear_dead`. Raises `BackendError` if the node is gone."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = [entry["NodeID"] for entry in ray.nodes() if entry["Alive"] and node_name(entry) == node]
        if not there:
            raise BackendError(f"node {node} is gone")
        clear = ray.remote(clear_dead).options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(there[0], soft=False)
        )
        left: list[int] = ray.get(clear.remote(f"{job}/", condemned), timeout=seconds)
        return left

    def actors(self, job: str) -> list[str]:
        """Returns the names of the job's living actors."""
        import ray

        return [name for name in ray.util.list_named_actors() if name.startswith(f"{job}/")]

    def groups(self, job: str) -> list[str]:
        """Returns the names of the job's placement groups."""
        from ray.util.placement_group import placement_group_table

        return [
            entry["name"]
            for entry in placement_group_table().values()
            if entry["state"] != "REMOVED" and entry["name"].startswith(f"{job}/")
        ]

    def remove_actor(self, name: str) -> None:
        """Kills an actor by name; nothing if there is none. One that is stopped lives on for some seconds."""
        import ray

        with suppress(BackendError):
            ray.kill(self.actor(name), no_restart=True)

    def _group(self, name: str) -> Any:
        """The placement group of that name, or None."""
        from ray.util.placement_group import get_placement_group

        try:
            return get_placement_group(name)
        except ValueError:
            return None

    def _table(self, group: Any) -> dict[str, Any]:
        from ray.util.placement_group import placement_group_table

        table: dict[str, Any] = placement_group_table(group)
        return table


async def in_thread(
    what: str, seconds: float, function: Callable[Given, Result], *arguments: Given.args, **named: Given.kwargs
) -> Result:
    """Returns what a call of Ray returns. Raises `BackendError` if it fails or takes longer; `what` says what it is for."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Result] = loop.create_future()

    def deliver(result: Result | None, error: BaseException | None) -> None:
        if answer.done():
            return  # nobody waits any more
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]  # it is the call's

    def run() -> None:
        result, problem = None, None
        try:
            result = function(*arguments, **named)
        except ClusterError as error:
            problem = error
        except Exception as error:  # noqa: BLE001 - Ray raises its own errors, gRPC's and Python's
            first = (str(error).splitlines() or [""])[0]
            problem = BackendError(f"{what} failed: {type(error).__name__}: {first}")
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, result, problem)

    threading.Thread(target=run, name=f"ray: {what}", daemon=True).start()
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError:
        raise BackendError(f"{what} took more than {seconds:g} s; does the Ray cluster live?") from None
