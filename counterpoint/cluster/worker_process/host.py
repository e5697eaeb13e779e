"""Runs one worker of a class from its construction to its end: the hooks in order, and the keeper's orders beside them.

`__init__`, `setup`, `self_check` and `start` run in the main thread, since signal handlers, torch and many native libraries want
that. The keeper's orders are read in a thread; `stop`, `on_failover`, `check_child` and `status` have one each, and heartbeats
another, so that they show that the interpreter lives whatever a hook does. A hook that fails outside the main thread ends the
process at once: nothing could interrupt `start`.
"""

from __future__ import annotations

import importlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, cast

from pydantic import TypeAdapter

from counterpoint.cluster.calls.group import RoleGroup
from counterpoint.cluster.manager.events import LONGEST_REASON
from counterpoint.cluster.spec import MASTER, role_of, sub_master_name
from counterpoint.cluster.worker import Context, Member, SubMaster, Worker
from counterpoint.cluster.worker_process.description import Description
from counterpoint.cluster.worker_process.link import InheritedLink
from counterpoint.cluster.worker_process.worker_calls import WorkerCalls
from counterpoint.transport.printable import clipped
from counterpoint.transport.process.keeper import messages

KEEPER_GONE = 70
"""Exit code when the keeper is gone; the kernel kills the process at the same time."""

EXIT_SECONDS, FAILED_EXIT_SECONDS = 10.0, 1.0
"""How long the threads that the worker left may keep the process from its end; after a failure, which is to be known soon."""

LONGEST_STATUS = 200

FAILED = 1
"""Exit code after an exception."""


class Host:
    """One worker's process."""

    def __init__(self, link: InheritedLink, description: Description) -> None:
        self._link = link
        self._description = description
        self._calls = WorkerCalls(description)
        self._context = HostedContext(description, link, self._calls)
        self._worker: Worker | None = None
        self._ready = self._finished = False
        self._signalled = False
        """Whether SIGTERM, and no order, ended the work before it was complete."""
        self._may_start = threading.Event()
        """Set by START, and by STOP."""
        self._stopped = threading.Event()
        """Set once `stop` has returned."""
        self._stopping = threading.Lock()
        """Decides, of a stop request and READY or the end of `start`, which came first."""
        self._status = ""
        self._failovers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._checks: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    # --- the main thread ---

    def run(self) -> int:
        """Runs the worker; returns the exit code, which is that of SIGTERM if that ended the work before it was complete."""
        signal.signal(signal.SIGTERM, lambda *_: self._spawn("stop", partial(self._stop, by_signal=True)))
        self._spawn("heartbeat", self._beat)
        try:
            self._run_hooks()
        except HookEndedError as end:
            self._report_end(end)
            return end.code
        finally:
            self._calls.close()
        return 128 + signal.SIGTERM if self._signalled else 0

    def _run_hooks(self) -> None:
        context, hooks = self._context, self._description
        self._worker = cast(Worker, call("__init__", self._construct))
        for name in ("setup", "self_check"):
            if not context.stop.is_set():
                call(name, getattr(self._worker, name))
        with self._stopping:
            self._ready = not context.stop.is_set()
        if not self._ready:
            call("stop", self._worker.stop)
            return
        for name, hook in (("status", self._ask_status), ("failover", self._fail_over), ("check", self._check)):
            self._spawn(name, hook)
        address = call("listen", lambda: self._calls.listen(self._worker))
        self._link.send(messages.READY, address=address, server_key=self._calls.public_key)
        self._may_start.wait()
        if not context.stop.is_set():
            self._link.send(messages.STARTED)
            call("start", self._work)
            with self._stopping:
                self._finished = not context.stop.is_set()
                if self._finished and hooks.task:
                    context.stop.set()  # so that a request to stop, from now on, does not stop it a second time
            if self._finished:
                self._link.send(messages.FINISHED)
                if hooks.task:
                    call("stop", self._worker.stop)  # the manager's deadline holds, as after a request
                    return
            context.stop.wait()
        self._stopped.wait()

    def _work(self) -> None:
        """Runs `start`. Raises `RuntimeError` if a task returns by itself and has left open what others wait for."""
        cast(Worker, self._worker).start()
        if self._description.task and not self._context.stop.is_set():
            left = [name for name, is_open in self._context.left_open.items() if is_open()]
            if left:
                raise RuntimeError(
                    f"it returned, and has not ended: {', '.join(left)}; call its `end` after the last record"
                )

    def _construct(self) -> Worker:
        for entry in reversed(self._description.path):
            if entry not in sys.path:
                sys.path.insert(0, entry)
        module_name, _, class_name = self._description.import_path.partition(":")
        found = getattr(importlib.import_module(module_name), class_name)
        is_master = self._description.rank < 0
        is_worker = isinstance(found, type) and issubclass(found, Worker)
        if not is_worker or issubclass(found, SubMaster) is not is_master:
            expected = "SubMaster" if is_master else "Worker, and of no SubMaster"
            raise TypeError(f"{self._description.import_path} is {found!r}; expected a subclass of {expected}")
        return cast(Worker, found(self._context))

    # --- the other threads ---

    def obey(self, message: dict[str, Any]) -> None:
        """Carries out one order of the keeper, or hands it to the thread that does. Called in the thread that reads."""
        match message:
            case {"kind": messages.START}:
                self._may_start.set()
            case {"kind": messages.STOP}:
                self._spawn("stop", self._stop)
            case {"kind": messages.MEMBERS, "members": list(members)}:
                self._context.update(members_of(members))
            case {"kind": messages.FAILOVER}:
                self._failovers.put(message)
            case {"kind": messages.CHECK_CHILDREN}:
                self._checks.put(message)

    def _stop(self, by_signal: bool = False) -> None:
        """Has the worker end in order; repeated requests change nothing."""
        with self._stopping:
            if self._context.stop.is_set():
                return
            ready = self._ready
            self._signalled = by_signal and not self._finished
            self._context.stop.set()
        self._may_start.set()
        if ready:
            call("stop", cast(Worker, self._worker).stop)
        self._stopped.set()

    def _beat(self) -> None:
        while True:
            self._link.send(messages.ALIVE, status=self._status)
            threading.Event().wait(self._description.heartbeat_seconds)

    def _ask_status(self) -> None:
        while True:
            try:
                status = str(cast(Worker, self._worker).status())
            except BaseException as error:  # noqa: BLE001 - the worker goes on
                status = f"status() raised {last_line(error)}"
            status = " ".join(status.split())[:LONGEST_STATUS]
            if status != self._status:
                self._status = status
                self._link.send(messages.ALIVE, status=status)
            threading.Event().wait(self._description.heartbeat_seconds)

    def _fail_over(self) -> None:
        while True:
            order = self._failovers.get()
            call("on_failover", cast(Worker, self._worker).on_failover, members_of(order["failed"]))
            self._link.send(messages.FAILOVER_DONE, notice=order["notice"])

    def _check(self) -> None:
        while True:
            order = self._checks.get()
            call("check_child", cast(SubMaster, self._worker).check_child, members_of(order["children"]))
            self._link.send(messages.CHILDREN_CHECKED, check=order["check"])

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        threading.Thread(target=self._guarded, args=(name, work), name=f"cluster-{name}", daemon=True).start()

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        """Runs a thread's work; whatever it raises ends the process."""
        try:
            work()
        except HookEndedError as end:
            self._report_end(end)
            end_at_once(end.code)
        except OSError as error:
            print(f"the keeper is gone: {error}", file=sys.stderr)  # noqa: T201 - into the worker's log
            end_at_once(KEEPER_GONE)
        except BaseException as error:  # noqa: BLE001 - a bug of ours, or a message that makes no sense
            self._report_end(HookEndedError(f"its {name} thread raised {last_line(error)}", 1))
            end_at_once(1)

    def _report_end(self, end: HookEndedError) -> None:
        try:
            self._link.send(messages.FAILED, reason=str(end))
        except OSError as error:
            print(f"the keeper is gone: {error}", file=sys.stderr)  # noqa: T201 - into the worker's log


def end_at_once(code: int) -> None:
    """Ends the process without waiting for any thread."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_soon(code: int) -> None:
    """Ends the process after a while if threads that do not end keep it alive until then."""

    def end() -> None:
        threading.Event().wait(FAILED_EXIT_SECONDS if code else EXIT_SECONDS)
        left = [thread.name for thread in threading.enumerate() if not thread.daemon]
        print(f"threads that did not end: {left}; the process ends", file=sys.stderr)  # noqa: T201 - into the worker's log
        end_at_once(code)

    threading.Thread(target=end, name="cluster-end", daemon=True).start()


class HookEndedError(Exception):
    """A hook raised, or called `sys.exit`: the process is to end with `code`. The text is the reason."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


def call(name: str, hook: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what the hook returns. Raises `HookEndedError`, after it has written the traceback to the log."""
    try:
        return hook(*arguments)
    except SystemExit as error:
        code = 0 if error.code is None else error.code
        if isinstance(code, int):
            code = code & 0xFF
            why = f": {error.__cause__}" if error.__cause__ else ""
            raise HookEndedError(
                clipped(f"`{name}` called sys.exit({error.code}){why}", LONGEST_REASON), code
            ) from error
        print(error.code, file=sys.stderr, flush=True)  # noqa: T201 - as the interpreter does
        raise HookEndedError(clipped(f"`{name}` called sys.exit({error.code!r})", LONGEST_REASON), FAILED) from error
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        raise HookEndedError(clipped(f"`{name}` raised {last_line(error)}", LONGEST_REASON), FAILED) from error


def last_line(error: BaseException) -> str:
    """Returns the last line of the error's traceback."""
    try:
        lines = "".join(traceback.format_exception_only(error)).split("\n")
    except Exception as further:  # noqa: BLE001 - the exception's own __str__ raised
        return f"{type(error).__name__} (its text cannot be made: {type(further).__name__})"
    return " ".join(line.strip() for line in lines if line.strip())


_MEMBERS = TypeAdapter(tuple[Member, ...])


def members_of(maps: Iterable[Any]) -> tuple[Member, ...]:
    """Returns the members that a message describes. Raises `ValueError`."""
    return _MEMBERS.validate_python(tuple(maps))


class HostedContext(Context):
    """What `Worker` gets here."""

    def __init__(self, description: Description, link: InheritedLink, calls: WorkerCalls) -> None:
        known = description.model_dump()
        super().__init__(**{each.name: known[each.name] for each in fields(Context) if each.name in known})
        self._link = link
        self._calls = calls
        self._members: dict[str, Member] = {}

    def update(self, members: Iterable[Member]) -> None:
        """Takes news of members."""
        self._members = self._members | {member.worker: member for member in members}
        self._calls.update(self._members.values())

    def get_nodes_by_role(self, role: str) -> Sequence[Member]:
        """See `Context.get_nodes_by_role`."""
        own = [
            member
            for member in self._members.values()
            if role_of(member.worker) == role and member.worker != sub_master_name(role)
        ]
        return sorted(own, key=lambda member: int(member.worker.rpartition("-")[2]))

    def group(self, role: str) -> RoleGroup:
        """See `Context.group`."""
        return self._calls.group(role)

    def replace(self, worker: str, incarnation: int, reason: str) -> None:
        """See `Context.replace`."""
        if self.rank != -1 or role_of(worker) != self.role or worker == sub_master_name(self.role):
            raise PermissionError(
                f"{self.worker} may not have {worker} replaced: only {self.role}-{MASTER} may, a worker of its role"
            )
        self._link.send(messages.REPLACE, worker=worker, incarnation=incarnation, reason=reason)

    def scale(self, count: int) -> None:
        """See `Context.scale`."""
        if self.rank != -1:
            raise PermissionError(
                f"{self.worker} may not change how many workers its role has: only {self.role}-{MASTER} may"
            )
        if not self.fewest <= count <= self.most:
            raise ValueError(f"role {self.role!r} may have {self.fewest} to {self.most} workers, not {count}")
        self._link.send(messages.SCALE, count=count)

    def stop_job(self, reason: str, code: int = 0) -> None:
        """See `Context.stop_job`."""
        self._link.send(messages.STOP_JOB, reason=reason, code=int(code))
