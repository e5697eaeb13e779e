"""The process of a trial: loads the trainable, and does what its executor asks over their socket, one request after another.

`serve` runs in the main thread of a process that the executor or an actor of Ray has started, or that is a fork of the tuner
(`counterpoint/tune/executors/forked_here.py`), and returns when the executor says so or is gone. All of the user's code runs
below it; what that raises is reported and ends the process.

| asked | answered |
|---|---|
| `setup` | `started`; again for another trial, when the process is used anew |
| `train` | `result`, with `made` before it when a function has made a checkpoint; `completed` when a function has returned |
| `save` | `saved` or `save_failed` |
| `restore`, `reset` | `started` |
| `export` | `exported` |
| `stop` | `stopped` |
| anything that raises | `failed` |
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import resource
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

from counterpoint.transport.frames import BadFrame
from counterpoint.tune.executors.frames import MESSAGES, as_data, receive
from counterpoint.tune.registry import adopt_environments, load
from counterpoint.tune.trainable.functions import FunctionEnded, FunctionTrainable, require_export, trainable_class
from counterpoint.tune.trainable.trainable import Trainable, TrialInfo

LONGEST_ERROR = 64 * 2**10
"""Characters of a traceback that are sent; the middle of a longer one is left out."""

OOM_SCORE = 500
"""Least kernel score (`oom_score_adj`) of a trial: when the machine's memory runs out it ends a trial, and not the
tuner."""

CANNOT_ANSWER = 70
"""The exit code of a process whose executor takes no answer any more."""


class TrialProcess:
    """The conversation of one process with its executor."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._trainable: Trainable | None = None
        self._streams = (os.dup(1), os.dup(2))

    def serve(self) -> None:
        """Answers until it is told to end, something raises, or the executor is gone."""
        going = True
        while going and (request := receive(self._connection)) is not None:
            try:
                going = self._answer(request)
            except BrokenPipeError:
                os._exit(CANNOT_ANSWER)
            except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is the executor's to know
                _limit_memory(0)  # there must be enough left to say what happened
                self._send("failed", error=_described(error), raised=as_data(error))
                self._stop_after_failure()
                return

    def _send(self, kind: str, **fields: Any) -> None:
        self._connection.sendall(MESSAGES.frame({"kind": kind, **fields}))

    def _answer(self, request: dict[str, Any]) -> bool:
        """Does what is asked. Returns whether the process goes on."""
        kind = request["kind"]
        if kind == "setup":
            self._setup(request)
        elif kind == "stop":
            self._stop(request)
            return bool(request["reuse"])
        elif self._trainable is None:
            raise BadFrame(f"{kind} was asked before setup")
        elif kind == "train":
            self._train(self._trainable)
        elif kind == "save":
            self._save(self._trainable, request)
        elif kind == "restore":
            self._trainable.restore(request["path"])
            self._started()
        elif kind == "export":
            self._send("exported", **self._export(request["formats"]))
        elif kind == "reset":
            self._reset(request["config"])
            if request["path"] is not None:
                self._it().restore(request["path"])
            self._started()
        else:
            raise BadFrame(f"there is no request {kind!r}")
        return True

    def _it(self) -> Trainable:
        assert self._trainable is not None
        return self._trainable

    def _setup(self, request: dict[str, Any]) -> None:
        Path(request["logdir"]).mkdir(parents=True, exist_ok=True)
        self._redirect(request["stdout"], request["stderr"])
        _limit_memory(request["memory"])
        adopt_environments(request["environments"])
        os.environ.update(request["environment"])
        trial = TrialInfo(request["trial_id"], request["trial_name"], request["logdir"])
        if self._trainable is None:
            kind = trainable_class(load(request["trainable"]), request["trainable"])
            _seed_anew()
            if request["export"]:
                require_export(kind)
            self._make(kind, request["config"], trial)
        else:
            self._reset(request["config"], trial)
        if request["path"] is not None:
            self._it().restore(request["path"])
        self._started()

    def _redirect(self, stdout: str | None, stderr: str | None) -> None:
        """Appends standard output and error to files; None stands for those that the process began with."""
        for stream, target, path in ((sys.stdout, 1, stdout), (sys.stderr, 2, stderr)):
            stream.flush()
            if path is None:
                os.dup2(self._streams[target - 1], target)
                continue
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # the interpreter's own
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            os.dup2(descriptor, target)
            os.close(descriptor)

    def _make(self, kind: type[Trainable], config: dict[str, Any], trial: TrialInfo) -> None:
        self._trainable = kind(config, trial)

    def _reset(self, config: dict[str, Any], trial: TrialInfo | None = None) -> None:
        """Gives the object another config; makes a new one where it does not take it."""
        it = self._it()
        if not it.reset(config, trial):
            self._trainable = None  # it is stopped once, whatever follows
            it.stop()
            self._make(type(it), config, trial or it._trial)

    def _started(self) -> None:
        kind = type(self._it())
        resets = kind.reset is not Trainable.reset or kind.reset_config is not Trainable.reset_config
        self._send("started", resets=resets, is_function=issubclass(kind, FunctionTrainable))

    def _train(self, it: Trainable) -> None:
        try:
            result = it.train()
        except FunctionEnded:
            self._send("completed")
            return
        if isinstance(it, FunctionTrainable) and it.made is not None:
            self._send("made", path=str(it.made), iteration=it.saved_iteration, result=result)
        self._send("result", result=result)

    def _save(self, it: Trainable, request: dict[str, Any]) -> None:
        try:
            path = it.save(request["path"])
        except Exception as error:  # noqa: BLE001 - the trial goes on without this checkpoint
            self._send("save_failed", error=_described(error))
            return
        iteration = it.saved_iteration if isinstance(it, FunctionTrainable) else it.iteration
        self._send("saved", path=path, iteration=iteration)

    def _stop(self, request: dict[str, Any]) -> None:
        exported = self._export(request["export"])
        if not request["reuse"]:
            self._stop_trainable()
        self._send("stopped", **exported, reuse=request["reuse"])

    def _stop_trainable(self) -> None:
        it, self._trainable = self._trainable, None
        if it is not None:
            it.stop()

    def _stop_after_failure(self) -> None:
        """Lets the trainable clean up; the executor has set a deadline, and knows what failed first."""
        try:
            self._stop_trainable()
        except BaseException:  # noqa: BLE001 - whatever the user's code raises
            traceback.print_exc()

    def _export(self, formats: list[str]) -> dict[str, Any]:
        it = self._trainable
        if it is None or not formats:
            return {"exported": {}, "error": ""}
        try:
            return {"exported": it.export_model(formats, it.logdir), "error": ""}
        except Exception as problem:  # noqa: BLE001 - a trial that has ended well stays so
            return {"exported": {}, "error": _described(problem)}


def _described(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    if len(text) > LONGEST_ERROR:
        text = f"{text[: LONGEST_ERROR // 2]}\n[...]\n{text[-LONGEST_ERROR // 2 :]}"
    return text.encode(errors="replace").decode()


def _seed_anew() -> None:
    """Gives each trial random numbers of its own: a fork begins as its parent, torch always with the same seed."""
    random.seed()  # noqa: TID251 - the global generator is the user's
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _limit_memory(size: int) -> None:
    """Lets an allocation fail that would take the process beyond so many bytes; 0 for no limit."""
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = size if size and (most == resource.RLIM_INFINITY or size < most) else most
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))


def run_trial(connection: int, crash: int) -> NoReturn:
    """Serves over an inherited socket, and ends this process. Where it crashes is written to the file `crash`."""
    code = 1
    try:
        _be_ended_first()
        faulthandler.enable(crash)
        TrialProcess(socket.socket(fileno=connection)).serve()
        code = 0
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _be_ended_first() -> None:
    """Makes the kernel end this process before the tuner when the machine has no memory left."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < OOM_SCORE:  # to lower it needs a privilege
            file.seek(0)
            file.write(str(OOM_SCORE))


def command(connection: int, crash: int, path: list[str]) -> list[str]:
    """Returns the command of a trial's process that is not forked, to which the two descriptors are inherited."""
    return [
        sys.executable,
        "-P",
        "-m",
        "counterpoint.tune.executors.trial_process",
        json.dumps([connection, crash, path]),
    ]


if __name__ == "__main__":
    inherited_connection, inherited_crash, sys.path[:] = json.loads(sys.argv[1])
    os.set_inheritable(inherited_connection, False)
    os.set_inheritable(inherited_crash, False)
    run_trial(inherited_connection, inherited_crash)
