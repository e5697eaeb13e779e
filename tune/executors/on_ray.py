"""The executor for a Ray cluster: each trial is an actor with the process of the trial below it, placed by Ray.

A trial takes all that it needs, `extra_*` included, with its one actor: all or nothing, on one node. Every node must reach the
experiment's directory and the user's modules by the same paths. Ray pickles its own actor class and the bytes of our messages;
nothing of the user's. Ray is imported at the first connection: it is the extra `ray`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from cluster.backends.base import Node
from cluster.backends.ray_cluster import RayCluster
from tune.errors import TuneError
from tune.executors.attempt import Attempt, Deadlines, ProcessLink
from tune.executors.frames import encode
from tune.executors.ledger import Ledger
from tune.executors.process_executor import ProcessTrialExecutor
from tune.executors.ray_actor import TrialActor
from tune.trial import Trial

CONNECT_SECONDS = 60.0

CALLS_AT_ONCE = 16
"""Of an actor: one waits for what the process says, another may kill it while some wait to be sent."""

LOOK_SECONDS = 5.0
"""Between two looks at the cluster's nodes."""

_HERE = {"memory_bytes": "memory"}
_ON_RAY = ("cpu", "gpu", "memory", "object_store_memory")


class RayTrialExecutor(ProcessTrialExecutor):
    """Runs trials on Ray."""

    def __init__(self, address: str = "", deadlines: Deadlines | None = None) -> None:
        """Connects this process to the cluster; without `address`, `$RAY_ADDRESS` has it. Raises `TuneError` if that fails."""
        super().__init__(deadlines, reuse_actors=False)
        self._ray = RayCluster(address)
        self._nodes: list[Node] = []
        self._connect()
        self._held: dict[str, dict[str, float]] = {}
        """What our trials have taken, by trial."""
        self._look: asyncio.Task[None] | None = None

    def _connect(self) -> None:
        """Connects in a thread of its own: in the main thread Ray would take SIGTERM for itself."""
        failed: list[BaseException] = []

        def connect() -> None:
            try:
                self._ray.connect()
                self._nodes = self._ray.nodes()
            except Exception as error:  # noqa: BLE001 - Ray raises its own errors, gRPC's and Python's
                failed.append(error)

        thread = threading.Thread(target=connect, name="ray: connecting", daemon=True)
        thread.start()
        thread.join(CONNECT_SECONDS)
        if failed or thread.is_alive():
            reason = failed[0] if failed else f"no connection after {CONNECT_SECONDS:g} s"
            raise TuneError(f"trials cannot run on Ray at {self._ray.address or 'no address'}: {reason}")

    def _ledger(self) -> Ledger:
        """The cluster as one machine: Ray decides where each trial has a place, and has it wait if there is none."""
        totals: dict[str, float] = {}
        for node in self._nodes:
            for name, amount in _resources(node).items():
                totals[name] = totals.get(name, 0.0) + amount
        ledger = Ledger(totals, [str(index) for index in range(int(totals.get("gpu", 0)))])
        for trial_id, needs in self._held.items():
            if ledger.fits(needs):  # else a node has left
                ledger.take(trial_id, needs)
        return ledger

    def has_resources(self, trial: Trial) -> bool:
        """Whether what the trial needs is not taken by our other trials, and some node is large enough."""
        return self._ledger().fits(trial.resources.totals()) and self.could_ever_run(trial) is None

    def could_ever_run(self, trial: Trial) -> str | None:
        """As `TrialExecutor.could_ever_run`: no node is large enough."""
        needs = trial.resources.totals()
        refused = [_of_one(node).impossible(needs) for node in self._nodes if node.alive]
        if not refused:
            return f"trial {trial} can never run on Ray: no node of the cluster is alive"
        if not all(refused):
            return None
        reasons = "; or ".join(sorted({reason for reason in refused if reason}))
        return f"trial {trial} can never run on Ray, since it must be on one node: {reasons}"

    def has_gpus(self) -> bool:
        """Whether a node has a GPU."""
        return any(_resources(node).get("gpu") for node in self._nodes)

    def resource_string(self) -> str:
        """Used and total resources in one line."""
        return str(self._ledger())

    def on_step_begin(self, trials: Any) -> None:
        """Looks at the nodes from time to time, beside the loop."""
        if self._look is None or self._look.done():
            self._look = asyncio.get_running_loop().create_task(self._look_at_nodes())

    async def _look_at_nodes(self) -> None:
        await asyncio.sleep(LOOK_SECONDS)
        self._nodes = [node for node in await asyncio.to_thread(self._ray.nodes) if node.alive]

    async def cleanup(self) -> None:
        """Ends every trial in order, and disconnects."""
        await self._stop_all()
        if self._look is not None:
            self._look.cancel()
            await asyncio.wait([self._look])
        await asyncio.to_thread(self._ray.disconnect)

    def _link(self, trial: Trial, trainable: str) -> tuple[ProcessLink, dict[str, str]]:
        needs = trial.resources.totals()
        if not self.has_resources(trial):
            raise TuneError(f"trial {trial} needs {needs}, which is not free now: {self.resource_string()}")
        process = _RayProcess(f"trial {trial}", needs)
        self._held[trial.trial_id] = needs
        return process, {}

    def _released(self, attempt: Attempt, reusable: bool) -> None:
        self._held.pop(attempt.trial_id, None)


class _RayProcess:
    """The process of a trial below an actor; a `ProcessLink`."""

    def __init__(self, name: str, needs: Mapping[str, float]) -> None:
        import ray

        self.resets = False
        self._loop = asyncio.get_running_loop()
        self._count = self._sent = 0
        self._on_message: Callable[[dict[str, Any]], None] = lambda message: None
        self._on_end: Callable[[str], None] = lambda how: None
        self._actor = (
            ray.remote(TrialActor)
            .options(
                num_cpus=needs.get("cpu", 0.0),
                num_gpus=needs.get("gpu", 0.0),
                memory=needs.get("memory") or None,
                resources={key: amount for key, amount in needs.items() if key not in _ON_RAY},
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=CALLS_AT_ONCE,
            )
            .remote([os.path.abspath(entry) for entry in sys.path])
        )
        self._ended = False
        self._listen()

    def attach(self, on_message: Callable[[dict[str, Any]], None], on_end: Callable[[str], None]) -> None:
        """As `ProcessLink.attach`."""
        self._on_message, self._on_end = on_message, on_end

    def send(self, message: dict[str, Any]) -> None:
        """As `ProcessLink.send`. Numbered, since Ray runs calls at once that were made one after the other."""
        self._actor.send.remote(self._sent, encode(message))
        self._sent += 1

    def kill(self) -> None:
        """As `ProcessLink.kill`."""
        self._actor.end.remote()

    def _listen(self) -> None:
        heard = self._actor.hear.remote(self._count).future()
        heard.add_done_callback(self._in_loop)

    def _in_loop(self, future: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(self._hear, future)
        except RuntimeError:  # the loop is closed: nobody listens any more
            return

    def _hear(self, future: Any) -> None:
        if (error := future.exception()) is not None:
            first = (str(error).splitlines() or [""])[0]
            self._end(f"was lost with its actor: {type(error).__name__}: {first}")
            return
        messages, how = future.result()
        self._count += len(messages)
        for message in messages:
            self._on_message(msgpack.unpackb(message[4:]))
        if how:
            self._end(how)
        else:
            self._listen()

    def _end(self, how: str) -> None:
        import ray

        if not self._ended:
            self._ended = True
            ray.kill(self._actor, no_restart=True)
            self._on_end(how)


def _resources(node: Node) -> dict[str, float]:
    """What a node has, as trials ask for it."""
    return {_HERE.get(name, name): amount for name, amount in node.resources.items()} if node.alive else {}


def _of_one(node: Node) -> Ledger:
    """The books of a node that has nothing to do."""
    totals = _resources(node)
    return Ledger(totals, [str(index) for index in range(int(totals.get("gpu", 0)))])
