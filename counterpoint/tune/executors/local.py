"""The executor for this machine: each trial is a child below a guardian, which loads the trainable for itself.

Trials die with the executor, however it ends (`transport/process/child.py`). What they need of the machine is booked in a ledger
before they start, all or nothing. Only the trials of lambdas and closures are forks
(`counterpoint/tune/executors/forked_here.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from counterpoint.cluster.devices import visible_devices
from counterpoint.transport.config import machine_memory
from counterpoint.transport.framed_maps import FramedChannel
from counterpoint.transport.process.child import Child
from counterpoint.transport.process.exit_codes import describe_exit
from counterpoint.tune.executors.attempt import Deadlines, ProcessLink
from counterpoint.tune.executors.called import CalledExecutor
from counterpoint.tune.executors.forked_here import ForkedTrial, TunerCopy, reason_against_a_fork
from counterpoint.tune.executors.frames import MESSAGES
from counterpoint.tune.executors.ledger import ResourceLedger
from counterpoint.tune.executors.trial_process import command
from counterpoint.tune.registry import CLOSURE, closures, search_path
from counterpoint.tune.resources import Resources
from counterpoint.tune.trial import Trial

TAIL_BYTES = 4096
"""How much of its standard error the message about a trial that died has."""


class LocalTrialExecutor(CalledExecutor):
    """Runs trials in processes of this machine."""

    most_idle = 8

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
        self.ledger = ResourceLedger(totals, devices)
        self._copies: list[TunerCopy] = []
        self._processes: set[_LocalProcess] = set()

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

    def prepare(self) -> None:
        """See `EventExecutor.prepare`: copies this process for lambdas and closures, while it has no threads."""
        if closures() and not reason_against_a_fork():
            self._copies.append(TunerCopy())

    async def close(self) -> None:
        """Ends every trial in order, and all processes."""
        await self._stop_all()
        self._end_idle()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_ended(), self._deadlines.stop_seconds)
        for process in self._processes:
            process.kill()
        await self._all_ended()
        for each in self._copies:
            await each.ended()
        self._copies.clear()

    async def _all_ended(self) -> None:
        while self._processes:
            await asyncio.wait([process.watch for process in self._processes])

    def _link(self, trial: Trial, trainable: str) -> tuple[ProcessLink, dict[str, str]]:
        devices = ",".join(self.ledger.take(trial.trial_id, trial.resources.totals()))
        environment = {"CUDA_VISIBLE_DEVICES": devices}
        key = (trainable, devices)
        if (process := self._take_idle(key)) is None:
            try:
                process = _LocalProcess(key, self._start, self._processes.discard)
            except BaseException:
                self.ledger.give_back(trial.trial_id)
                raise
            self._processes.add(process)
        assert isinstance(process, _LocalProcess)
        process.stderr = Path(trial.logdir) / "stderr" if trial.log_to_file is True else None
        return process, environment

    def _start(self, trainable: str, connection: int, crash: int) -> Child | ForkedTrial:
        """Starts a process for a trainable. Raises `OSError`, and `TuneError` for a closure that can be forked no more."""
        if not trainable.startswith(CLOSURE):
            descriptors = (connection, crash)
            return Child("the process of a trial", command(*descriptors, search_path()), pass_fds=descriptors)
        name = trainable.removeprefix(CLOSURE)
        copy = next((each for each in self._copies if each.has(name)), None)
        if copy is None:
            copy = TunerCopy()
            self._copies.append(copy)
        return copy.start(connection, crash)

    def _free(self, trial_id: str) -> None:
        self.ledger.give_back(trial_id)


class _LocalProcess(ProcessLink):
    """One process of a trial; its key are the trainable and the devices."""

    def __init__(
        self,
        key: tuple[str, str],
        start: Callable[[str, int, int], Child | ForkedTrial],
        on_over: Callable[[_LocalProcess], None],
    ) -> None:
        """Starts it. Raises as `start` does."""
        super().__init__(key)
        self.stderr: Path | None = None
        self._on_over = on_over
        self._killing: asyncio.Task[object] | None = None
        self._crash = os.memfd_create("crash", os.MFD_CLOEXEC)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = start(key[0], theirs.fileno(), self._crash)
        except BaseException:
            ours.close()
            os.close(self._crash)
            raise
        self._channel = FramedChannel(ours, MESSAGES, self._hear, self._broken)
        self.watch = asyncio.get_running_loop().create_task(self._watch())
        """Waits for its end."""

    def send(self, message: dict[str, Any]) -> None:
        """See `ProcessLink.send`."""
        self._channel.send(message)

    def kill(self) -> None:
        """See `ProcessLink.kill`."""
        self._killing = self._killing or asyncio.get_running_loop().create_task(self._process.killed())

    async def _watch(self) -> None:
        """Waits until it is gone, and all below it, and says how it ended."""
        code = await self._process.ended()
        self._channel.drain()
        self._channel.close()
        crash = os.pread(self._crash, 16 * TAIL_BYTES, 0).decode(errors="replace").strip()
        os.close(self._crash)
        tail = "" if self.stderr is None else _tail(self.stderr)
        parts = [
            describe_exit(code),
            crash and f"where it was:\n{crash}",
            tail and f"the end of {self.stderr}:\n{tail}",
        ]
        self._on_over(self)
        self._on_end("\n\n".join(part for part in parts if part))

    def _hear(self, message: dict[str, Any]) -> None:
        self._on_message(message)

    def _broken(self, why: str) -> None:
        self._on_message({"kind": "failed", "error": f"the trial's process does not keep to the protocol: {why}"})
        self.kill()


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
    return ""
