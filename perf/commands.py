"""The commands that demos and chaos tests run, each a process of its own, and how one waits for what they do."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from counterpoint.job.directory import is_running
from counterpoint.job.processes_file import read_workers
from counterpoint.transport.process.child import Child, last_lines

PATIENCE_SECONDS = 900.0
"""The deadline of a wait that names no other. The longest demo takes some five minutes on two cores, a restart of vLLM two."""

STOP_SECONDS = 180.0
"""The time a command has to end in order."""

POLL_SECONDS = 0.1


class PerfError(Exception):
    """A wait has reached its deadline, or a command has failed."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class Command:
    """A `counterpoint` command, under a guardian that ends it when this process ends. Leaving the block stops it.

    It writes plain lines to `log`, else to our output, since two live panels would mix.
    """

    def __init__(self, log: Path | None, *words: str) -> None:
        self.log = log
        self.name = f"counterpoint {words[0]}"
        command = [sys.executable, "-m", "counterpoint.cli.main", *words]
        self._process = Child(self.name, command, log=log, environment=os.environ | {"TTY_COMPATIBLE": "0"})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """That of its guardian."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.code

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self.code is not None

    def stop(self) -> None:
        """Ends it in order if it still runs, and kills it after `STOP_SECONDS`."""
        if not self.ended:
            self._process.stop(STOP_SECONDS)

    def wait(self) -> int:
        """Waits for its end; returns its exit code. Raises `PerfError` at the deadline."""
        try:
            return self._process.wait(PATIENCE_SECONDS)
        except TimeoutError:
            raise PerfError(f"{self} did not end within {PATIENCE_SECONDS:g} s{self.last_output()}") from None

    def succeed(self) -> None:
        """Waits for its end. Raises `PerfError` at the deadline, and if its exit code is not 0."""
        if code := self.wait():
            raise PerfError(f"{self} ended with exit code {code}{self.last_output()}")

    def last_output(self) -> str:
        """Returns the end of its log, from a new line on; nothing if it has none."""
        return "" if self.log is None else "\n" + "\n".join([f"{self.log}:", *last_lines(self.log)])

    def __str__(self) -> str:
        return self.name


def until(
    what: str,
    condition: Callable[[], bool],
    needed: Sequence[Command] = (),
    meanwhile: Callable[[], None] = lambda: None,
    seconds: float = PATIENCE_SECONDS,
) -> None:
    """Waits for a condition, and does something `meanwhile`, again and again.

    Raises `PerfError`, with the exit code of the command, if one of those `needed` has ended, and at the deadline.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        meanwhile()
        for command in needed:
            if (code := command.code) is not None:
                raise PerfError(
                    f"{command} ended with {code} while this waited for {what}{command.last_output()}", code or 1
                )
        if time.monotonic() > deadline:
            raise PerfError(f"waited {seconds:g} s for {what}, in vain{''.join(each.last_output() for each in needed)}")
        time.sleep(POLL_SECONDS)


def is_ready(job: Path) -> bool:
    """Returns whether the job runs with every worker ready."""
    workers = read_workers(job) if is_running(job) else []
    return bool(workers) and all(worker["state"] == "ready" for worker in workers)


def say(text: str) -> None:
    """Prints a line with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
