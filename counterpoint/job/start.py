"""Starts a job from Python: `counterpoint run` as a process of its own, and what a notebook asks of it.

    job = counterpoint.start("math.toml", fresh=True, orchestrator={"steps": 20})
    job.wait()
    counterpoint.read(job.directory).steps()

The job does not end with the Python process that started it, as it does not end with a shell.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tomli_w

from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load
from counterpoint.job.directory import JOB_FILE, JOB_LOCK
from counterpoint.job.reading.log_errors import ERROR_LINE
from counterpoint.job.reading.status import JobSnapshot, StatusReader
from counterpoint.job.results.step_calls import StepCalls
from counterpoint.transport import exact_json
from counterpoint.transport.configuration.toml_file import anchored
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.lock import holder_of
from counterpoint.transport.printable import printable
from counterpoint.transport.process.child import Child
from counterpoint.transport.process.exit_codes import describe_exit

LAST_LINES = 20
"""Most lines of a job's output that say why it ended."""

WRITTEN = "# Written by counterpoint.start from a dict."
"""How the file of a job begins that was given as a dict."""

_started: weakref.WeakSet[StartedJob] = weakref.WeakSet()


class StartedJob:
    """A job that this process started."""

    def __init__(self, directory: Path, process: Child, output: int, steps: StepCalls | None) -> None:
        self.directory = directory
        """The job's directory."""
        self._process = process
        self._output = output
        """Descriptor of the file, in memory, that has what the command prints."""
        weakref.finalize(self, os.close, output)
        self._steps = steps
        self._status = StatusReader(directory)
        _started.add(self)

    @property
    def code(self) -> int | None:
        """The exit code of the job's command (`docs/commands.md`); None while it runs."""
        return self._process.code

    @property
    def output(self) -> str:
        """What the command has printed so far: a job that cannot start says here why."""
        return os.pread(self._output, os.fstat(self._output).st_size, 0).decode(errors="replace")

    @property
    def is_beginning(self) -> bool:
        """Whether the command has yet to take the directory: what is there, if anything, is of an earlier job."""
        holder = holder_of(self.directory / JOB_LOCK)
        return self.code is None and (holder is None or holder.pid != self._process.pid)

    def status(self) -> JobSnapshot:
        """Returns the job's present status, without runs until they have begun. Raises `UserError` if it could not begin."""
        while self.code is None:
            place = _inode(self.directory)
            if self.is_beginning or not (self.directory / JOB_FILE).exists():
                return JobSnapshot(self.directory, None, {}, [], running=True)
            try:
                return self._status.read()
            except UserError:
                if place == _inode(self.directory):
                    raise
                # The command has just moved the directory of an earlier job aside.
        return self._status.read()

    def wait(self, timeout_seconds: float | None = None, *, check: bool = False) -> int:
        """Waits until the job has ended and `on_step` has had its steps, and returns its exit code: 0 if it is done.

        Raises `TimeoutError` if it still runs after so many seconds, what `on_step` raised, and with `check` a `UserError` with
        the reason if the job is not done.
        """
        late = TimeoutError(f"the job in {self.directory} still runs after {timeout_seconds} s")
        began = time.monotonic()
        try:
            code = self._process.wait(timeout_seconds)
        except TimeoutError:
            raise late from None
        if self._steps is not None and threading.current_thread() is not self._steps.thread:
            left = None if timeout_seconds is None else max(0.0, timeout_seconds - (time.monotonic() - began))
            if not self._steps.wait(left):
                raise late
        if check and code != 0:
            raise UserError(f"the job in {self.directory} {describe_exit(code)}: {self._reason()}")
        return code

    def _reason(self) -> str:
        """Why the job ended: what the command printed from its last error on, or its last lines."""
        lines = printable(self.output).splitlines()
        errors = [place for place, line in enumerate(lines) if ERROR_LINE.search(line)]
        first = errors[-1] if errors else max(0, len(lines) - LAST_LINES)
        return "\n".join(lines[first : first + LAST_LINES]).strip() or "it printed nothing"

    def stop(self, timeout_seconds: float | None = None) -> int:
        """Ends the job in order, so that it can be resumed, and returns its exit code: 143 unless it was done. As `wait`."""
        self._process.signal(signal.SIGTERM)
        return self.wait(timeout_seconds)


def start(
    file: Path | str | Mapping[str, Any],
    *,
    resume: bool = False,
    fresh: bool = False,
    on_step: Callable[[dict[str, Any]], object] | None = None,
    **overrides: Any,
) -> StartedJob:
    """Starts the job that `file` describes, and returns at once.

    Args:
        file: The job's TOML file, or its content as a dict, which is written beside the job's directory, as `OUTPUT_DIR.toml`.
        resume: As `--resume`.
        fresh: As `--fresh`.
        on_step: Called in a thread with the metrics of each step that was trained, in the order of steps of a run: a row of
            `counterpoint.read(...).steps()` as a dict. After an exception it gets no more, and `wait` raises it.
        overrides: Values that replace those of the file, by section: `orchestrator={"steps": 20}`.

    Raises:
        UserError: The file or an override is wrong. What only the command finds out, such as a port that is taken, is in the
            job's `output`.
    """
    flags = [f"--{key}={value}" for key, value in _flags(overrides)]
    file = _written(file, flags) if isinstance(file, Mapping) else file
    config = load(JobConfig, Path(file), flags)
    words = [*(["--resume"] if resume else []), *(["--fresh"] if fresh else []), *flags]
    command = [sys.executable, "-P", "-m", "counterpoint.cli.main", "run", str(file), *words]
    steps = None if on_step is None else StepCalls(config.output_dir, on_step, resume)
    output = os.memfd_create("output of a job")
    process = Child("the job", command, stdout=output, stderr=output, guarded=False)
    job = StartedJob(config.output_dir, process, output, steps)
    if steps is not None:
        steps.begin(lambda: not job.is_beginning, lambda: job.code is not None)
    return job


def _written(content: Mapping[str, Any], flags: list[str]) -> Path:
    """Writes the file of a job, and returns its path. Raises `UserError` for wrong content, and if another's file is there."""
    try:
        values = anchored(exact_json.loads(exact_json.dumps(_plain(content))), Path.cwd())
        text = f"{WRITTEN}\n{tomli_w.dumps(values)}"
    except TypeError as error:
        raise UserError(f"the content of a job's file: {error}") from None
    with tempfile.TemporaryDirectory() as directory:
        draft = Path(directory) / "the dict given to counterpoint.start"
        draft.write_text(text)
        output_dir = load(JobConfig, draft, flags).output_dir
    file = output_dir.with_name(f"{output_dir.name}.toml")
    if file.exists() and not file.read_text(errors="replace").startswith(WRITTEN):
        raise UserError(
            f"{file} is in the way: the job's file would be written there, and counterpoint.start did not write it"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.encode())
    return file


def _plain(value: Any) -> Any:
    """The value without what TOML lacks: a path is its text, and a key that is None is not set."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


def is_beginning(directory: Path) -> bool:
    """Whether a job that this process started has yet to take the directory."""
    return any(job.directory.absolute() == directory.absolute() and job.is_beginning for job in [*_started])


def _flags(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yields each value with its key, as a command line has them."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flags(value, f"{above}{name}.")
        elif isinstance(value, str | Path):
            yield above + name, str(value)
        else:
            try:
                yield above + name, exact_json.dumps(value).decode()
            except TypeError as error:
                raise UserError(f"{above}{name}: {error}") from None


def _inode(directory: Path) -> int | None:
    try:
        return directory.stat().st_ino
    except FileNotFoundError:
        return None
