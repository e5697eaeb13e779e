"""The executor for a Ray cluster: each trial is an actor with the process of the trial below it, placed by Ray.

A trial takes all that it needs, `extra_*` included, with its one actor: all or nothing, on one node. Every node must reach the
experiment's directory and the user's modules by the same paths. Ray pickles its own actor class and the bytes of our messages;
nothing of the user's. Ray is imported at the first connection: it is the extra `ray`.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgpack

from counterpoint.cluster.backends.base import Node
from counterpoint.cluster.backends.ray_cluster import RayCluster
from counterpoint.tune.errors import TuneError
from counterpoint.tune.executors.attempt import Deadlines, ProcessLink
from counterpoint.tune.executors.called import CalledExecutor
from counterpoint.tune.executors.frames import MESSAGES
from counterpoint.tune.executors.ledger import ResourceLedger
from counterpoint.tune.executors.ray_actor import TrialActor
from counterpoint.tune.registry import CLOSURE, search_path, why_not_imported
from counterpoint.tune.resources import Resources
from counterpoint.tune.trial import Trial

CONNECT_SECONDS = 60.0

CALLS_AT_ONCE = 16
"""The calls of an actor at once: one waits for what the process says, another may kill it while some wait to be sent."""

_HERE = {"memory_bytes": "memory"}
_ON_RAY = ("cpu", "gpu", "memory", "object_store_memory")


class RayTrialExecutor(CalledExecutor):
    """Runs trials on Ray."""

    def __init__(
        self,
        queue_trials: bool = False,
        reuse_actors: bool = False,
        ray_auto_init: bool | None = None,
        refresh_period: float = 0.5,
        address: str = "",
        deadlines: Deadlines | None = None,
    ) -> None:
        """Connects this process to the cluster; without `address`, `$RAY_ADDRESS` has it. Raises `TuneError` if that fails.

        Without both, a Ray of this machine alone is started, unless `ray_auto_init` is False. The cluster's nodes are looked at
        again after `refresh_period` seconds. With `reuse_actors` the actor of a trial that has ended is used for the next one
        with the same trainable and needs, if that is a function or has `reset_config`.
        """
        super().__init__(deadlines, reuse_actors, queue_trials)
        if refresh_period < 0:
            raise TuneError(f"refresh_period = {refresh_period}: expected 0 or more seconds")
        self._refresh_period = refresh_period
        self._ray = RayCluster(address, starts_local=ray_auto_init is not False)
        self._nodes: list[Node] = []
        self._seen = 0.0
        """The time of the last look at the nodes."""
        self._leave = threading.Event()
        self._connect()
        self._held: dict[str, dict[str, float]] = {}
        """What our trials have taken, by trial."""
        self._look_task: asyncio.Task[None] | None = None

    def _connect(self) -> None:
        """Connects in a thread of its own: in the main thread Ray would take SIGTERM for itself.

        The thread stays, since a Ray that it has started ends with it.
        """
        failed: list[BaseException] = []
        tried = threading.Event()

        def connect() -> None:
            try:
                self._ray.connect()
                self._refresh()
            except Exception as error:  # noqa: BLE001 - Ray raises its own errors, gRPC's and Python's
                failed.append(error)
                return
            finally:
                tried.set()
            self._leave.wait()

        threading.Thread(target=connect, name="ray: connection", daemon=True).start()
        in_time = tried.wait(CONNECT_SECONDS)
        if failed or not in_time:
            reason = failed[0] if failed else f"no connection after {CONNECT_SECONDS:g} s"
            raise TuneError(f"trials cannot run on Ray at {self._ray.address or 'no address'}: {reason}")

    def _ledger(self) -> ResourceLedger:
        """The cluster as one machine: Ray decides where each trial has a place, and has it wait if there is none."""
        totals: dict[str, float] = {}
        for node in self._nodes:
            for name, amount in _resources(node).items():
                totals[name] = totals.get(name, 0.0) + amount
        ledger = ResourceLedger(totals, [str(index) for index in range(int(totals.get("gpu", 0)))])
        for trial_id, needs in self._held.items():
            if ledger.fits(needs):  # else a node has left
                ledger.take(trial_id, needs)
        return ledger

    def has_resources(self, resources: Resources) -> bool:
        """Whether these resources are not taken by our trials, and some node is large enough.

        Looks at the nodes first, if that was `refresh_period` ago and no event loop would have to wait for it.
        """
        if time.monotonic() - self._seen > self._refresh_period and not _in_a_loop():
            self._refresh()
        return self._ledger().fits(resources.totals()) and self._too_large(resources) is None

    def could_ever_run(self, trial: Trial) -> str | None:
        """See `EventExecutor.could_ever_run`: no node is large enough."""
        reason = self._too_large(trial.resources)
        return None if reason is None else f"trial {trial} can never run on Ray{reason}"

    def _too_large(self, resources: Resources) -> str | None:
        refused = [_of_one(node).impossible(resources.totals()) for node in self._nodes if node.alive]
        if not refused:
            return ": no node of the cluster is alive"
        if not all(refused):
            return None
        reasons = "; or ".join(sorted({reason for reason in refused if reason}))
        return f", since it must be on one node: {reasons}"

    def has_gpus(self) -> bool:
        """Whether a node has a GPU."""
        return any(_resources(node).get("gpu") for node in self._nodes)

    def resource_string(self) -> str:
        """Used and total resources in one line."""
        return str(self._ledger())

    def on_step_begin(self, trial_runner: Any) -> None:
        """Looks at the nodes, if that was `refresh_period` ago; beside the event loop, if there is one."""
        if time.monotonic() - self._seen <= self._refresh_period:
            return
        if not _in_a_loop():
            self._refresh()
        elif self._look_task is None or self._look_task.done():
            self._look_task = asyncio.get_running_loop().create_task(asyncio.to_thread(self._refresh))

    def _refresh(self) -> None:
        self._nodes = [node for node in self._ray.nodes() if node.alive]
        self._seen = time.monotonic()

    async def close(self) -> None:
        """Ends every trial in order, and disconnects."""
        await self._stop_all()
        self._end_idle()
        if self._look_task is not None:
            self._look_task.cancel()
            await asyncio.wait([self._look_task])
        await asyncio.to_thread(self._ray.disconnect)
        self._leave.set()

    def _link(self, trial: Trial, trainable: str) -> tuple[ProcessLink, dict[str, str]]:
        if trainable.startswith(CLOSURE):
            raise TuneError(f"{trial} cannot run on Ray: {why_not_imported(trainable)}")
        needs = trial.resources.totals()
        if not self.has_resources(trial.resources):
            raise TuneError(f"trial {trial} needs {needs}, which is not free now: {self.resource_string()}")
        key = (trainable, json.dumps(needs, sort_keys=True))
        if (process := self._take_idle(key)) is None:
            self._end_idle()  # else the new actor might wait for what they hold: Ray still counts it
            process = _RayProcess(key, needs)
        self._held[trial.trial_id] = needs
        return process, {}

    def _free(self, trial_id: str) -> None:
        self._held.pop(trial_id, None)


class _RayProcess(ProcessLink):
    """The process of a trial below an actor; its key are the trainable and the needs."""

    def __init__(self, key: tuple[str, str], needs: Mapping[str, float]) -> None:
        import ray

        super().__init__(key)
        self._loop = asyncio.get_running_loop()
        self._count = self._sent = 0
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
            .remote(search_path())
        )
        self._ended = False
        self._listen()

    def send(self, message: dict[str, Any]) -> None:
        """See `ProcessLink.send`. Numbered, since Ray runs calls at once that were made one after the other."""
        self._actor.send.remote(self._sent, MESSAGES.frame(message))
        self._sent += 1

    def kill(self) -> None:
        """See `ProcessLink.kill`."""
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


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _resources(node: Node) -> dict[str, float]:
    """What a node has, as trials ask for it."""
    return {_HERE.get(name, name): amount for name, amount in node.resources.items()} if node.alive else {}


def _of_one(node: Node) -> ResourceLedger:
    """The books of a node that has nothing to do."""
    totals = _resources(node)
    return ResourceLedger(totals, [str(index) for index in range(int(totals.get("gpu", 0)))])
