"""Leaves a request to a run and waits for its answer, for the other files here. `counterpoint/run/requests.py` is the protocol.

A request id may be given, so that a caller that was killed or lost its connection makes the same request again and gets the same
answer.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from counterpoint.job.directory import JOB_FILE, is_running, orchestrator_of, own_steps, run_ids_in
from counterpoint.run.requests import (
    Answer,
    OrchestratorRequest,
    SaveRequest,
    other_use,
    read_answer,
    withdraw_request,
    write_request,
)
from counterpoint.transport.config import IDENTIFIER_PATTERN, Config
from counterpoint.transport.errors import Obstructed, UserError
from counterpoint.transport.files.lock import take_lock

POLL_SECONDS = 0.1

ANSWER_SECONDS = 60.0
"""How long to wait for an answer, unless the caller says otherwise."""

LOCK_SECONDS = 10.0
"""How long to wait while another process changes the same file."""

Fields = TypeVar("Fields", bound=Config)


class VerbOutcome(Config, frozen=True):
    """What has come of a verb on a run."""

    run_id: str
    """The id of the run that is asked."""
    sentence: str
    """The same for people: what has come of it."""


class NotThere(UserError):
    """There is no such job, run or server."""


class Refused(UserError):
    """The request cannot be carried out as things are; nothing has changed, and the message says why."""


class NotAnswered(UserError):
    """Nobody has carried the request out in time. It was taken back, unless it was being carried out already."""

    code = 1


def run_directory(job: Path, run_id: str) -> Path:
    """Returns the run's directory. Raises `NotThere`, and `UserError` for a damaged `job.json`."""
    known = run_ids_in(job)
    if run_id not in known and run_id in (own_steps(job) or {}):
        raise NotThere(
            f"run {run_id!r} of {job.absolute()} has not started yet; `counterpoint status {job}` shows when it has"
        )
    if not re.fullmatch(IDENTIFIER_PATTERN, run_id) or run_id not in known:
        there = f"its runs are {', '.join(known)}" if known else "it has none; --job names the job's directory"
        raise NotThere(f"there is no run {run_id!r} in {job.absolute()}: {there}")
    return job / f"run_{run_id}"


def require_job(job: Path) -> None:
    """Raises `NotThere` unless the directory is that of a job."""
    if not (job / JOB_FILE).is_file():
        raise NotThere(f"{job.absolute()} holds no job ({JOB_FILE} is missing); --job names the job's directory")


def checked(kind: type[Fields], run_id: str, **values: Any) -> Fields:
    """Returns what is asked of a run. Raises `UserError` for values that this may not have."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise UserError(f"this cannot be asked of run {run_id}: {wrong}") from None


def ask(job: Path, run_id: str, request: SaveRequest | OrchestratorRequest, timeout: float) -> Answer:
    """Leaves a request and returns its answer, which says `done`.

    Raises `NotThere`, `Refused` and `NotAnswered`. An id that was used for another request is refused.
    """
    run_dir = run_directory(job, run_id)
    _check_id(run_dir, request)
    answer = read_answer(run_dir, request.request_id)
    if answer is None:
        if not isinstance(request, SaveRequest) and orchestrator_of(job, run_id) is None:
            raise Refused(f"run {run_id} does not run, so that nobody would carry out {request.kind!r}")
        try:
            write_request(run_dir, request)
        except FileNotFoundError:
            raise Refused(f"run {run_id} has not begun: it has no {run_dir / 'control'}") from None
        answer = _awaited(job, run_id, request.request_id, timeout)
        _check_id(run_dir, request)  # another request may have been left under it at the same moment
    if answer is None:
        whom = "trainer" if isinstance(request, SaveRequest) else "orchestrator"
        raise NotAnswered(
            f"the {whom} has not answered {request.kind!r} to run {run_id}, within {timeout:g} s or before it ended; the request "
            "was taken back, but if it had been read already, it is carried out all the same. "
            f"`counterpoint status {job}` says whether it runs"
        )
    if answer.outcome == "refused":
        raise Refused(f"run {run_id} refuses {request.kind!r}: {answer.reason}")
    return answer


def _check_id(run_dir: Path, request: SaveRequest | OrchestratorRequest) -> None:
    if (other := other_use(run_dir, request)) is not None:
        raise Refused(
            f"request_id = {request.request_id!r} was used for {other}, so that {request.kind!r} was not asked of the run in "
            f"{run_dir}; give each request an id of its own"
        )


def _awaited(job: Path, run_id: str, request_id: str, timeout: float) -> Answer | None:
    """Waits for an answer, but not for a run that has ended and that nobody starts again."""
    run_dir, deadline = job / f"run_{run_id}", time.monotonic() + timeout
    while (answer := read_answer(run_dir, request_id)) is None and time.monotonic() < deadline:
        if orchestrator_of(job, run_id) is None and not is_running(job):
            break
        time.sleep(POLL_SECONDS)
    if answer is None:
        withdraw_request(run_dir, request_id)
        answer = read_answer(run_dir, request_id)  # it may have been written at this moment
    return answer


def await_lock(path: Path) -> int:
    """Takes a lock that its holders have for a moment, and returns its descriptor. Raises `Obstructed` after `LOCK_SECONDS`."""
    try:
        return take_lock(path, f"another process holds {path}", LOCK_SECONDS)
    except OSError as error:
        raise Obstructed(str(error.strerror)) from None


@contextmanager
def alone(path: Path, taken: str) -> Iterator[None]:
    """Holds a lock for its block. Raises `Refused`, with the message `taken`, while another process holds it."""
    try:
        lock = take_lock(path, taken)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise Refused(error.strerror) from None
    try:
        yield
    finally:
        os.close(lock)
