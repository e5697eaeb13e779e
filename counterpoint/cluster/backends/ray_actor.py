"""The actor of one worker on Ray: it starts the worker's process as a guarded child of its own, and relays.

Ray 2.60.0 leaves the main thread to one method at a time: beside a concurrency group, and in an async actor, every method runs in
another thread. A worker's `start` wants the main thread (signal handlers, torch, many native libraries), and others must be heard
while it runs; so its process is the same as on one machine, and neither torch nor vLLM is in the actor. The guardian
(`transport/process/launch.py`) kills all that is below it when the actor ends, whatever ended it, or is frozen for two leases.

Every method takes the master's epoch, and refuses one that is lower than the highest heard. What the worker says is kept,
numbered, until a master has acknowledged it. Without a master for a lease the worker is stopped in order, and the actor ends; the
last one of a bundle removes the placement group. Ray restarts nothing and repeats no call; the manager decides.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from counterpoint.cluster.backends.one_worker import OneWorker
from counterpoint.cluster.backends.order import WorkerOrder
from counterpoint.cluster.backends.owned_process import NEWS, OwnedProcess
from counterpoint.cluster.backends.ray_places import ActorName, node_name
from counterpoint.cluster.backends.reports import Reports
from counterpoint.cluster.manager.events import Event
from counterpoint.cluster.remains import MARK, clear_dead, kill_marked, start_of
from counterpoint.transport.files.own_directory import remove_left
from counterpoint.transport.process import launch
from counterpoint.transport.process.keeper import messages
from counterpoint.transport.wires.endpoint import NODE_ADDRESS

logger = logging.getLogger(__name__)

TICKS_IN_A_LEASE = 20
LEASES_OF_THE_FENCE = 2
"""Leases after which nothing runs any more of a worker whose actor is frozen, or hears no master."""

ROTATION_SECONDS = 5.0
"""How often the log is looked at."""

LAST_SECONDS = 120.0
"""How long the last actor of a bundle waits for the others before it leaves the placement group to its job's next start."""


class WorkerActor:
    """One incarnation of a worker. All runs on Ray's event loop for it, whose thread lives as long as the actor."""

    def __init__(self, name: str, lease_seconds: float) -> None:
        """Starts no process yet. `name`: the actor's own."""
        import ray

        here, address = ray.get_runtime_context(), ray.util.get_node_ip_address()
        self._name, self._lease = name, lease_seconds
        self._me, self._group = here.current_actor, ray.util.get_current_placement_group()
        self._node, self._listen = node_name({"NodeManagerAddress": address, "NodeID": here.get_node_id()}), address
        self._mark = f"{name}:{os.getpid()}:{start_of(os.getpid())}"
        _own_threads()
        remove_left(Path(os.environ.get(launch.SHARED_TMPDIR) or tempfile.gettempdir()), launch.TEMPORARY)
        clear_dead(f"{name.partition('/')[0]}/")
        os.environ |= {MARK: self._mark, NODE_ADDRESS: address}
        self._epoch = 0
        self._heard = launch.alive_clock()
        self._ending = ""
        self._kill_at = float("inf")
        self._worker: OneWorker | None = None
        self._process: OwnedProcess | None = None
        self._reports, self._news = Reports(), asyncio.Event()
        self._beat: dict[str, Any] | None = None
        self._rotated = time.monotonic()
        self._watching = asyncio.get_running_loop().create_task(self._watch())

    # --- for masters ---

    async def create(self, epoch: int, order: WorkerOrder) -> dict[str, Any]:
        """Starts the worker's process; again changes nothing. `Created` or `CreateFailed` is among what is `said`."""
        if refused := self._refusal(epoch):
            return refused
        if self._ending:
            return {"refused": f"it ends: {self._ending}"}
        if self._worker is None:
            self._worker = OneWorker(order, self._node, self._tell)
            self._spawn(self._worker)
        return {"node": self._node}

    async def obey(self, epoch: int, order: Mapping[str, Any]) -> dict[str, Any]:
        """Carries out an order, or passes it on to the process (`transport/process/keeper/messages.py`)."""
        if refused := self._refusal(epoch):
            return refused
        if self._worker is None or self._process is None:
            return {}
        match order["kind"]:
            case messages.STOP:
                self._worker.asked = True
                self._process.terminate()
            case messages.KILL:
                self._kill()
            case _ if not self._worker.answer(order):
                self._process.send(order)
        return {}

    async def said(self, epoch: int, received: int, acknowledged: int, seconds: float) -> dict[str, Any]:
        """Returns the reports above the number `received`, and the last heartbeat; waits so many seconds for one.

        `acknowledged`: the reports up to that number need not be repeated to anybody.
        """
        if refused := self._refusal(epoch):
            return refused
        self._reports.acknowledge(acknowledged)
        deadline = time.monotonic() + seconds
        while epoch == self._epoch and self._beat is None and not self._reports.after(received):
            self._news.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._news.wait()
            except TimeoutError:
                break
        if refused := self._refusal(epoch):
            return refused
        beat, self._beat = self._beat, None
        living = None if self._worker is None else self._worker.living()
        reports = [asdict(report) for report in self._reports.after(received)]
        return {"node": self._node, "reports": reports, "beat": beat, "living": living}

    async def leave(self) -> None:
        """Ends the actor in order."""
        import ray

        ray.actor.exit_actor()

    def _refusal(self, epoch: int) -> dict[str, Any]:
        """What a master of a lower epoch is answered; nothing for the highest, which is heard of."""
        self._look_at_the_lease()
        if epoch < self._epoch:
            return {"stale": self._epoch}
        self._heard = launch.alive_clock()
        if epoch > self._epoch:
            self._epoch = epoch
            if self._process is not None:
                self._note_beat(alive=False)
            self._news.set()  # a master of the earlier epoch waits
        return {}

    # --- the process ---

    def _spawn(self, worker: OneWorker) -> None:
        try:
            process = OwnedProcess(worker.order, self._hear, LEASES_OF_THE_FENCE * self._lease)
        except OSError as error:
            worker.not_spawned(str(error))
            return
        self._process = process
        worker.spawned(process.guardian_pid)
        own = {"node": self._node, "listen": f"tcp://{self._listen}"}
        process.send({"kind": messages.DESCRIPTION, "description": {**worker.order.description, **own}})
        descriptor = os.pidfd_open(process.guardian_pid)
        asyncio.get_running_loop().add_reader(descriptor, self._on_exit, descriptor)

    def _hear(self, worker: str, incarnation: int, message: Mapping[str, Any]) -> None:
        if message["kind"] in (messages.ALIVE, NEWS):
            self._note_beat(alive=message["kind"] == messages.ALIVE)
        elif self._worker is not None:
            self._worker.hear(message)

    def _note_beat(self, *, alive: bool) -> None:
        assert self._process is not None
        alive = alive or (self._beat is not None and self._beat["alive"])
        self._beat = self._process.beat(alive=alive)
        self._news.set()

    def _tell(self, event: type[Event], fields: Mapping[str, Any]) -> None:
        assert self._worker is not None
        if self._reports.add(self._worker.order.worker, self._worker.order.incarnation, event, fields) is not None:
            self._news.set()

    def _kill(self) -> None:
        assert self._worker is not None
        assert self._process is not None
        self._worker.killed = True
        self._process.kill()

    def _on_exit(self, descriptor: int) -> None:
        """The guardian has ended: after all that is below it, unless it was killed itself."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(descriptor)
        os.close(descriptor)
        assert self._process is not None
        _, status = os.waitpid(self._process.guardian_pid, 0)
        self._burial = loop.create_task(self._bury(self._process, launch.exit_code_of(status)))

    async def _bury(self, process: OwnedProcess, code: int) -> None:
        assert self._worker is not None
        process.read_rest()
        if left := await asyncio.to_thread(kill_marked, self._mark):
            logger.error("processes of %s cannot be killed: %s", self._name, left)
        process.close()
        self._process = None
        self._worker.exited(code)

    # --- without a master ---

    async def _watch(self) -> None:
        while True:
            self._look_at_the_lease()
            if self._process is not None:
                self._process.show_life()
                if launch.alive_clock() > self._kill_at:
                    self._kill()
                if time.monotonic() - self._rotated > ROTATION_SECONDS:
                    self._rotated = time.monotonic()
                    await self._rotate(self._process)
            elif self._ending:
                threading.Thread(target=self._depart, name="departure", daemon=True).start()
                return
            await asyncio.sleep(min(0.5, self._lease / TICKS_IN_A_LEASE))

    async def _rotate(self, process: OwnedProcess) -> None:
        try:
            await asyncio.to_thread(process.rotate_log)
        except OSError as error:
            logger.warning("the log of %s cannot be rotated: %s", self._name, error)

    def _look_at_the_lease(self) -> None:
        """Has the worker end in order if no master was heard of for a lease; it never goes back on that."""
        now = launch.alive_clock()
        silent = now - self._heard
        if self._ending or silent <= self._lease:
            return
        self._ending = f"no master for {silent:.1f} s; the lease is {self._lease:g} s"
        if self._worker is not None and self._process is not None:
            longest = self._heard + LEASES_OF_THE_FENCE * self._lease
            self._kill_at = min(now + self._worker.order.stop_timeout_seconds, longest)
            if not (self._worker.finished or self._worker.asked):
                self._worker.cut_off = self._ending
            self._process.terminate()

    def _depart(self) -> None:
        """Ends the actor, and removes the placement group if nothing else is in it: the master may be gone for good.

        Of several actors that end at the same time, the one with the first name waits for the others.
        """
        import ray

        name = ActorName.parse(self._name)
        assert name is not None
        deadline = time.monotonic() + LAST_SECONDS
        try:
            while others := [
                other
                for other in map(ActorName.parse, ray.util.list_named_actors())
                if other is not None and (other.job, other.bundle) == (name.job, name.bundle) and other != name
            ]:
                if min(map(str, others)) < self._name or time.monotonic() > deadline:
                    return
                time.sleep(0.2)
            ray.util.remove_placement_group(self._group)
        finally:
            self._me.leave.remote()


def _own_threads() -> None:
    """Removes the number of threads that Ray sets for numerical libraries in an actor.

    It counts the cores that the actor reserved, often none; the worker decides by itself, as on one machine.
    """
    with open("/proc/self/environ", "rb") as file:
        given = {entry.partition(b"=")[0] for entry in file.read().split(b"\0")}
    if b"OMP_NUM_THREADS" not in given:
        os.environ.pop("OMP_NUM_THREADS", None)
