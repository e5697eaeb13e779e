"""The executor for this machine: each trial is a process, forked in milliseconds from one that has imported its module.

Trials die with the executor, however it ends (`counterpoint/tune/executors/fork_server.py`). What they need of the machine is
booked in a ledger before they start, all or nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from counterpoint.cluster.devices import visible_devices
from counterpoint.transport.config import machine_memory
from counterpoint.transport.framed_maps import FramedChannel
from counterpoint.transport.process.exit_codes import describe_exit
from counterpoint.tune.executors.attempt import END, Attempt, Deadlines, ProcessLink
from counterpoint.tune.executors.fork_client import ForkClient
from counterpoint.tune.executors.forked_here import ForkedHere, reason_against_a_fork
from counterpoint.tune.executors.frames import MESSAGES
from counterpoint.tune.executors.ledger import Ledger
from counterpoint.tune.executors.process_executor import ProcessTrialExecutor
from counterpoint.tune.registry import CLOSURE, closures
from counterpoint.tune.resources import Resources
from counterpoint.tune.trial import Trial

TAIL_BYTES = 4096
"""How much of its standard error the message about a trial that died has."""

MOST_IDLE = 8
"""Processes that wait to be used anew; more are ended."""

GONE_SECONDS = 5.0
"""How long a process may live without its socket, which it can only have closed itself."""


class LocalTrialExecutor(ProcessTrialExecutor):
    """Runs trials in processes of this machine."""

    def __init__(
        self,
        cpus: float | None = None,
        gpus: int | Sequence[str] | None = None,
        memory: int | None = None,
        object_store_memory: int | None = None,
        custom_resources: Mapping[str, float] | None = None,
        reuse_actors: bool = False,
        deadlines: Deadlines | None = None,
        queue_trials: bool = False,
    ) -> None:
        """What is not given is what the machine has. `gpus` are so many of the visible devices, or their ids.

        With `reuse_actors` the process of a trial that has ended is used for the next one with the same trainable, if that is a
        function or has `reset_config`.
        """
        super().__init__(deadlines, reuse_actors, queue_trials)
        devices = visible_devices() if gpus is None or isinstance(gpus, int) else list(gpus)
        if isinstance(gpus, int):
            devices = (devices or [str(index) for index in range(gpus)])[:gpus]
        totals = {
            "cpu": float(cpus if cpus is not None else len(os.sched_getaffinity(0))),
            "memory": float(machine_memory() if memory is None else memory),
            "object_store_memory": float(machine_memory() if object_store_memory is None else object_store_memory),
            **(custom_resources or {}),
        }
        self.ledger = Ledger(totals, devices)
        self._servers: dict[str, ForkClient] = {}
        """The fork server of each module."""
        self._forked: ForkedHere | None = None
        """Forked before there was an event loop, and not used yet."""
        self._lost: list[ForkClient] = []
        self._processes: dict[int, _LocalProcess] = {}
        """The process of each slot."""
        self._slots = itertools.count()
        self._idle: dict[tuple[str, str], list[_LocalProcess]] = {}
        """Idle processes, by trainable and devices."""

    def has_resources(self, resources: Resources) -> bool:
        """See `TrialExecutor.has_resources`."""
        return self.ledger.fits(resources.totals())

    def could_ever_run(self, trial: Trial) -> str | None:
        """See `EventExecutor.could_ever_run`."""
        why = self.ledger.impossible(trial.resources.totals())
        return None if why is None else f"trial {trial} can never run here: {why}"

    def has_gpus(self) -> bool:
        """Whether there is a GPU for trials."""
        return self.ledger.totals["gpu"] > 0

    def resource_string(self) -> str:
        """Used and total resources in one line."""
        return str(self.ledger)

    async def close(self) -> None:
        """Ends every trial in order, and all processes."""
        await self._stop_all()
        await self._end_idle()
        for process in self._processes.values():
            process.close()
        self._processes.clear()
        self._idle.clear()
        if self._forked is not None:
            self._lost.append(self._client(CLOSURE, cold=True, forked=self._forked))
            self._forked = None
        servers = [*self._servers.values(), *self._lost]
        self._servers.clear()
        self._lost.clear()
        for server in servers:
            server.end()
        for server in servers:
            await server.ended()

    async def _end_idle(self) -> None:
        """Ends in order what waits to be used anew, so that each trainable cleans up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadlines.stop_seconds
        idle = {process.slot: process for waiting in self._idle.values() for process in waiting}
        for process in idle.values():
            process.send(END)
        while idle.keys() & self._processes.keys() and loop.time() < deadline:  # noqa: ASYNC110 - each sets its own event
            await asyncio.sleep(0.002)

    def _link(self, trial: Trial, trainable: str) -> tuple[ProcessLink, dict[str, str]]:
        devices = ",".join(self.ledger.take(trial.trial_id, trial.resources.totals()))
        environment = {"CUDA_VISIBLE_DEVICES": devices}
        idle = self._idle.get((trainable, devices))
        if idle:
            process = idle.pop()
        else:
            try:
                process = self._launch(trainable, devices)
            except BaseException:
                self.ledger.give_back(trial.trial_id)
                raise
        process.stderr = Path(trial.logdir) / "stderr" if trial.log_to_file is True else None
        return process, environment

    def _launch(self, trainable: str, devices: str) -> _LocalProcess:
        process = _LocalProcess(self, next(self._slots), trainable, devices)
        try:
            process.launch()
        except BaseException:
            process.close()
            raise
        self._processes[process.slot] = process
        return process

    def server_of(self, trainable: str) -> ForkClient:
        """The fork server of a trainable's module; starts it if there is none."""
        if trainable.startswith(CLOSURE):
            return self._forked_server(trainable.removeprefix(CLOSURE))
        module = trainable.rpartition(":")[0]
        if module not in self._servers:
            self._start_server(module, cold=False)
        return self._servers[module]

    def prepare(self) -> None:
        """See `EventExecutor.prepare`: forks a server for lambdas and closures, while this process has no threads."""
        if closures() and not reason_against_a_fork():
            self._forked = ForkedHere()

    def _forked_server(self, name: str) -> ForkClient:
        """A fork server that has this closure. Raises `TuneError` if there is none and none can be forked any more."""
        for server in self._servers.values():
            if server.forked is not None and server.forked.has(name):
                return server
        forked, self._forked = self._forked, None
        if forked is None or not forked.has(name):
            if forked is not None:
                self._lost.append(self._client(CLOSURE, cold=True, forked=forked))
            forked = ForkedHere()
        module = f"{CLOSURE}{next(self._slots)}"
        self._servers[module] = self._client(module, cold=True, forked=forked)
        return self._servers[module]

    def _client(self, module: str, cold: bool, forked: ForkedHere | None = None) -> ForkClient:
        return ForkClient(module, self._exited, self._refused, self._server_lost, cold, forked)

    def _start_server(self, module: str, cold: bool) -> None:
        self._servers[module] = self._client(module, cold)

    def _released(self, attempt: Attempt, reusable: bool) -> None:
        self.ledger.give_back(attempt.trial_id)
        process = attempt.link
        assert isinstance(process, _LocalProcess)
        if not reusable:
            return
        if sum(map(len, self._idle.values())) >= MOST_IDLE:
            process.attach(lambda message: None, lambda how: None)
            process.send(END)
            return
        waiting = self._idle.setdefault((process.trainable, process.devices), [])
        process.attach(lambda message: None, lambda how: waiting.remove(process) if process in waiting else None)
        waiting.append(process)

    def _exited(self, slot: int, code: int) -> None:
        if (process := self._processes.pop(slot, None)) is not None:
            process.end(describe_exit(code))

    def _refused(self, slot: int, error: str) -> None:
        if (process := self._processes.pop(slot, None)) is not None:
            process.end(f"was not started: {error}")

    def _server_lost(self, server: ForkClient) -> None:
        """A fork server died, and all its processes with it. If it had not begun to fork, another tries without the import."""
        self._lost.append(server)
        if self._servers.get(server.module) is server:
            del self._servers[server.module]
        its = [process for process in self._processes.values() if process.server is server]
        if not server.ready and not server.cold:
            again = [process for process in its if not process.is_killed]
            if again:
                self._start_server(server.module, cold=True)
            for process in again:
                process.launch()
            its = [process for process in its if process.is_killed]
        for process in its:
            del self._processes[process.slot]
            process.end(f"was killed: the fork server of {server.module} has died")


class _LocalProcess:
    """One process of a trial; a `ProcessLink`."""

    def __init__(self, executor: LocalTrialExecutor, slot: int, trainable: str, devices: str) -> None:
        self.slot, self.trainable, self.devices = slot, trainable, devices
        self.resets = False
        self.is_killed = False
        self.stderr: Path | None = None
        self.channel: FramedChannel | None = None
        self._executor = executor
        self._crash = -1
        self._asked: list[dict[str, Any]] = []
        """Kept until the first answer: what to ask again of another process if the fork server dies first."""
        self._heard = False
        self._gone_timer: asyncio.TimerHandle | None = None
        self._on_message: Callable[[dict[str, Any]], None] = lambda message: None
        self._on_end: Callable[[str], None] = lambda how: None

    def launch(self) -> None:
        """Has it forked; again if the first fork server died before it could."""
        self.close()
        self.server = self._executor.server_of(self.trainable)
        self._crash = os.memfd_create("crash", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair()
        self.channel = FramedChannel(ours, MESSAGES, self._hear, self._broken, self._gone)
        self.server.fork(self.slot, theirs, os.dup(self._crash))
        for message in self._asked:
            self.channel.send(message)

    def attach(self, on_message: Callable[[dict[str, Any]], None], on_end: Callable[[str], None]) -> None:
        """See `ProcessLink.attach`."""
        self._on_message, self._on_end = on_message, on_end

    def send(self, message: dict[str, Any]) -> None:
        """See `ProcessLink.send`."""
        assert self.channel is not None
        self.channel.send(message)
        if not self._heard:
            self._asked.append(message)

    def kill(self) -> None:
        """See `ProcessLink.kill`."""
        self.is_killed = True
        if self.server.ready:
            self.server.kill(self.slot)
        else:  # it hangs in the import of the trainable's module
            self.server.end()

    def end(self, how: str) -> None:
        """The process is gone, and all below it."""
        if self.channel is not None:
            self.channel.drain()
        crash = _content(self._crash)
        self.close()
        tail = "" if self.stderr is None else _tail(self.stderr)
        parts = [how, crash and f"where it was:\n{crash}", tail and f"the end of {self.stderr}:\n{tail}"]
        self._on_end("\n\n".join(part for part in parts if part))

    def close(self) -> None:
        """Closes what this end has of it."""
        if self._gone_timer is not None:
            self._gone_timer.cancel()
        if self.channel is not None:
            self.channel.close()
        if self._crash >= 0:
            os.close(self._crash)
            self._crash = -1

    def _hear(self, message: dict[str, Any]) -> None:
        self._heard = True
        self._asked.clear()
        self._on_message(message)

    def _gone(self) -> None:
        """The process ends, as its socket has: it is waited for, and killed if it does not."""
        self._gone_timer = asyncio.get_running_loop().call_later(GONE_SECONDS, self.kill)

    def _broken(self, why: str) -> None:
        self._on_message({"kind": "failed", "error": f"the trial's process does not keep to the protocol: {why}"})
        self.kill()


def _content(file: int) -> str:
    return os.pread(file, 16 * TAIL_BYTES, 0).decode(errors="replace").strip() if file >= 0 else ""


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
    return ""
