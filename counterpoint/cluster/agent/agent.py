"""The agent of a node: owns worker processes, obeys the master of the highest epoch, and survives its death.

The shell around `table.py`: a ROUTER socket for masters, the workers' processes below guardians, and a clock that goes on while
the machine sleeps. Every event goes through `_do`, which carries out what the table decides. It runs on asyncio's own loop, since
uvloop keeps SIGCHLD to itself, and in the main thread, to which the kernel ties the guardians' lives.

The window of a frozen agent: whoever stops an agent (SIGSTOP, a sleeping machine) stops neither its workers nor their guardians.
The agent sends each guardian a sign of life four times in a lease, and a guardian that has had none for two leases kills its
worker. So two leases after a master was last heard no worker of its epoch runs, whatever became of its agent; a master that
cannot reach a node waits for that long before it replaces the workers there.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Iterable, Mapping
from typing import Any

import zmq
import zmq.asyncio

from counterpoint.cluster.agent import instructions, protocol
from counterpoint.cluster.agent.order import WorkerOrder
from counterpoint.cluster.agent.owned_process import OwnedProcess
from counterpoint.cluster.agent.protocol import MESSAGES
from counterpoint.cluster.agent.settings import AgentSettings
from counterpoint.cluster.agent.table import Table
from counterpoint.transport.frames import BadFrame
from counterpoint.transport.process import launch

logger = logging.getLogger(__name__)

TICKS_IN_A_LEASE = 20
SIGNS_IN_A_LEASE = 4
LEASES_OF_THE_FENCE = 2
"""Leases without a sign of life after which a guardian kills its worker."""

ROTATION_SECONDS = 5.0
"""How often logs are looked at."""

LAST_MESSAGES_SECONDS = 2.0
"""How long an ended agent's last messages may take."""

BURIAL_SECONDS = 0.005
"""How often the end of what a killed guardian left is looked for."""


class Agent:
    """One agent, with a socket that is bound already."""

    def __init__(self, settings: AgentSettings, router: zmq.asyncio.Socket) -> None:
        self._settings = settings
        self._router = router
        self._table = Table(
            settings.agent,
            settings.node,
            settings.job,
            settings.lease_seconds,
            heard=launch.alive_clock(),
            listen=settings.listen,
        )
        self._processes: dict[str, OwnedProcess] = {}
        self._ended: dict[str, tuple[int, float]] = {}
        """Workers whose guardian has ended: its code, and when; until nothing is left below."""
        self._outgoing: asyncio.Queue[tuple[Any, Mapping[str, Any]]] = asyncio.Queue()
        self._finished = asyncio.Event()
        self._logged: set[str] = set()
        self._signed = 0.0

    async def run(self) -> None:
        """Runs until the agent's end: its master's order, a signal, or a lease without a master. Leaves no process."""
        loop = asyncio.get_running_loop()
        launch.become_subreaper()
        loop.add_signal_handler(signal.SIGCHLD, self._collect)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        tasks = [asyncio.create_task(part) for part in (self._receive(), self._send(), self._watch(), self._rotate())]
        finished = asyncio.create_task(self._finished.wait())
        try:
            done, _ = await asyncio.wait([*tasks, finished], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {finished}:
                task.result()  # raises: none of them ends by itself
        finally:
            launch.kill_descendants()
            for process in self._processes.values():
                process.close()
            await self._send_rest()
            for task in (*tasks, finished):
                task.cancel()
            await asyncio.gather(*tasks, finished, return_exceptions=True)

    # --- the four tasks ---

    async def _receive(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            try:
                message = MESSAGES.unpack(frames[-1])
            except BadFrame as error:
                self._log_once(f"dropped a message: {error}")
                continue
            epoch = self._table.epoch
            self._do(self._table.receive(frames[0], message, launch.alive_clock()), frames[0])
            if self._table.epoch > epoch:
                for process in self._processes.values():
                    self._tell(process.beat(alive=False))

    async def _send(self) -> None:
        while True:
            peer, message = await self._outgoing.get()
            try:
                await self._router.send_multipart([peer, MESSAGES.pack(message)])
            except BadFrame as error:  # a worker's doing: the others need their agent
                self._log_once(f"a message is not sent: {error}")
            finally:
                self._outgoing.task_done()

    async def _watch(self) -> None:
        while True:
            self._do(self._table.tick(launch.alive_clock()))
            now = time.monotonic()
            if now - self._signed >= self._table.lease_seconds / SIGNS_IN_A_LEASE:
                self._signed = now
                for process in self._processes.values():
                    process.show_life()
            await asyncio.sleep(min(0.5, self._table.lease_seconds / TICKS_IN_A_LEASE))

    async def _rotate(self) -> None:
        while True:
            await asyncio.sleep(ROTATION_SECONDS)
            for process in list(self._processes.values()):
                try:
                    await asyncio.to_thread(process.rotate_log)
                except OSError as error:
                    self._log_once(f"the log of {process.order.worker} cannot be rotated: {error}")

    # --- what is decided ---

    def _do(self, decided: Iterable[instructions.Instruction], asked_by: Any = None) -> None:
        """Carries out instructions, and those that follow from them at once."""
        waiting = list(decided)
        while waiting:
            match waiting.pop(0):
                case instructions.Answer(message):
                    self._outgoing.put_nowait((asked_by, message))
                case instructions.Tell(message):
                    self._tell(message)
                case instructions.Dismiss(peer, message):
                    self._outgoing.put_nowait((peer, message))
                case instructions.Spawn(order):
                    waiting += self._spawn(order)
                case instructions.Send(worker, message) if worker in self._processes:
                    self._processes[worker].send(message)
                case instructions.Terminate(worker) if worker in self._processes and worker not in self._ended:
                    self._processes[worker].terminate()
                case instructions.Kill(worker) if worker in self._processes and worker not in self._ended:
                    self._processes[worker].kill()
                case instructions.Finish(reason):
                    logger.info("ends: %s", reason)
                    self._finished.set()

    def _tell(self, message: Mapping[str, Any]) -> None:
        if self._table.peer is not None:
            self._outgoing.put_nowait((self._table.peer, message))

    def _spawn(self, order: WorkerOrder) -> list[instructions.Instruction]:
        fence = LEASES_OF_THE_FENCE * self._table.lease_seconds
        try:
            process = OwnedProcess(order, self._hear, fence)
        except OSError as error:
            return self._table.spawn_failed(order.worker, str(error))
        self._processes[order.worker] = process
        return self._table.spawned(order.worker, process.guardian_pid)

    # --- what happens ---

    def _hear(self, worker: str, incarnation: int, message: Mapping[str, Any]) -> None:
        """Handles a message of a worker's process."""
        self._do(self._table.hear(worker, incarnation, message))
        process = self._processes.get(worker)
        of_life = message["kind"] in (protocol.ALIVE, protocol.NEWS)
        if of_life and process is not None and process.order.incarnation == incarnation:
            self._tell(process.beat(alive=message["kind"] == protocol.ALIVE))

    def _collect(self) -> None:
        """Reaps every child. One that is no guardian is an orphan of a killed guardian."""
        guardians = {process.guardian_pid: worker for worker, process in self._processes.items()}
        for pid, code in launch.reap():
            if pid in guardians:
                self._processes[guardians[pid]].read_rest()
                self._ended[guardians[pid]] = (code, time.monotonic())
        self._bury()

    def _bury(self) -> None:
        """Reports the end of workers once nothing is left below: a guardian that was itself killed has left all."""
        if not self._ended:
            return
        living = [process.guardian_pid for worker, process in self._processes.items() if worker not in self._ended]
        left = launch.orphans(living)
        trackers_until = max(since for _, since in self._ended.values()) + launch.TRACKER_SECONDS
        launch.kill_all(pid for pid in left if time.monotonic() > trackers_until or not launch.is_resource_tracker(pid))
        if left:
            asyncio.get_running_loop().call_later(BURIAL_SECONDS, self._bury)
            return
        for worker, (code, _) in list(self._ended.items()):
            del self._ended[worker]
            self._processes.pop(worker).close()
            self._do(self._table.exited(worker, code))

    def _on_signal(self, number: signal.Signals) -> None:
        self._do(self._table.end(f"it received {signal.Signals(number).name}", launch.alive_clock()))

    async def _send_rest(self) -> None:
        try:
            async with asyncio.timeout(LAST_MESSAGES_SECONDS):
                await self._outgoing.join()
        except TimeoutError:
            logger.warning("the last messages were not sent within %g s", LAST_MESSAGES_SECONDS)

    def _log_once(self, text: str) -> None:
        if text not in self._logged and len(self._logged) < 1000:
            self._logged.add(text)
            logger.warning(text)
