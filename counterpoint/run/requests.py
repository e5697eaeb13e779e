"""Requests to a run that is being trained, as files in its `control/`, and the answers to them.

Whoever may write to the job's directory leaves `control/requests/<request id>.json`. The role that carries the request out (the
trainer: `save` and `copy`; the run's orchestrator: the others) writes `control/answers/<request id>.json`, and then removes the
request. So a request that is made again under its id, after a kill of either end, is carried out once. Files are written
atomically and read as untrusted ones. `docs/contracts.md`, "Requests to a run", has the promises.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from counterpoint.transport.config import IDENTIFIER_PATTERN, Config, Identifier
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.shared_directory import make_shared
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.transport.printable import printable

MAX_BYTES = 2**16
"""The size of a request or an answer."""

MAX_WAITING = 64
"""Requests of one run that are looked at in one pass."""


def new_request_id() -> str:
    """Returns an id. Later ids sort behind earlier ones, and requests are taken up in the order of their ids."""
    return f"{time.time_ns()}-{secrets.token_hex(4)}"


class RunRequest(Config):
    """What every request to a run has.

    The other fields of each are what its verb is asked with (`counterpoint/job/admin/verbs.py`).
    """

    kind: str
    """Which request this is."""
    request_id: Identifier = Field(default_factory=new_request_id)
    """Names the request; made again under the same id, it is the same request."""


class SaveRequest(RunRequest):
    """The trainer makes the run's newest step durable, and keeps that checkpoint until it is removed by the asker."""

    kind: Literal["save"] = "save"


class CopyRequest(RunRequest):
    """The run takes the adapter and the optimizer's moments of a durable step of a run of the same job, in place of an update."""

    kind: Literal["copy"] = "copy"
    source: Identifier
    """The run that is copied. It may have ended, or be the receiver itself."""
    step: int | None = Field(default=None, ge=1)
    """A durable step of the source. Unset: its newest."""
    schedule: bool = False
    """Continue from the source's position in the learning-rate schedule, too."""


def _as_written(changes: dict[str, Any]) -> dict[str, Any]:
    """Returns the changes if a file has them as they are. JSON has no NaN, which would be written as null, and so be another."""
    try:
        dumps(changes)
        json.dumps(changes, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a value cannot be written as JSON: {error}") from None
    return changes


class ChangeRequest(RunRequest):
    """Keys of the run's configuration change from its next step on."""

    kind: Literal["change"] = "change"
    changes: Annotated[dict[str, Any], AfterValidator(_as_written)] = Field(min_length=1, max_length=256)
    """New values by dotted key, such as `sampling.temperature` or `environments.<name>.ratio`."""


class PauseRequest(RunRequest):
    """No group of the run starts any more, until it is resumed; what is in flight finishes."""

    kind: Literal["pause"] = "pause"
    reason: str = Field(default="", max_length=500)
    """Why, for people; it is shown with the run."""


class ResumeRequest(RunRequest):
    """A paused run goes on."""

    kind: Literal["resume"] = "resume"


class DumpRequest(RunRequest):
    """The next step of the run is written in full to `raw_rollouts/`, for replay."""

    kind: Literal["dump"] = "dump"


LONGEST_PROFILE_SECONDS = 300.0


class ProfileRequest(RunRequest):
    """The stacks of the orchestrator's event loop are sampled, and written to `profiles/<request id>.*`."""

    kind: Literal["profile"] = "profile"
    seconds: float = Field(default=10.0, gt=0, le=LONGEST_PROFILE_SECONDS, allow_inf_nan=False)
    """How long it is profiled, in seconds, at most 300."""


OrchestratorRequest = ChangeRequest | PauseRequest | ResumeRequest | DumpRequest | ProfileRequest
"""What a run's orchestrator carries out."""

AnyRequest = SaveRequest | CopyRequest | OrchestratorRequest

Request = Annotated[AnyRequest, Field(discriminator="kind")]

_REQUEST: TypeAdapter[AnyRequest] = TypeAdapter(Request)


class Answer(Config):
    """What came of a request."""

    request_id: Identifier
    """The id of the request."""
    outcome: Literal["done", "refused"]
    """`refused`: nothing has changed, and `reason` says why."""
    step: int | None = None
    """The step of the answer. For `save`: the durable step. For `copy`: the receiver's step that the copy took the
    place of. For `change`: the first step with the new values. For `dump`: the step that was dumped. For the others:
    the newest committed step."""
    source_step: int | None = None
    """The source's step that a `copy` has copied."""
    reason: str = ""
    """Why the request was refused."""
    kind: str = ""
    """The request's. Empty in an answer of an earlier version, and for a damaged request."""
    digest: str = ""
    """The digest of what was asked. Empty where `kind` is, and for a copy."""


class DamagedRequest(ValueError):
    """A file in `control/requests/` that is no request; the message says why."""


def write_request(run_dir: Path, request: AnyRequest) -> None:
    """Leaves a request, unless one of this id waits or was answered. Raises `OSError`, also if there is no such run."""
    (run_dir / "control").stat()  # do not make a deleted run's directory again
    path = _request_path(run_dir, request.request_id)
    if path.exists() or read_answer(run_dir, request.request_id) is not None:
        return
    make_shared(path.parent)
    write_atomically(path, dumps(request.model_dump(mode="json")))


def withdraw_request(run_dir: Path, request_id: str) -> None:
    """Removes a request that waits. One that was taken up already is carried out all the same."""
    with suppress(IsADirectoryError):  # it is no request, as its answer says, and stands in no other's way
        _request_path(run_dir, request_id).unlink(missing_ok=True)


def waiting_requests(run_dir: Path, kinds: Collection[str]) -> Iterator[tuple[str, AnyRequest | DamagedRequest]]:
    """Yields the requests of these kinds, by id, in the order of their ids; a damaged one counts as of every kind.

    A request whose answer exists is removed. Links as `control/requests` or `control/answers` hold nothing, since they
    may lead to another run's.
    """
    directory = run_dir / "control" / "requests"
    try:
        stems = (name.removesuffix(".json") for name in os.listdir(directory) if name.endswith(".json"))
        names = sorted(stem for stem in stems if re.fullmatch(IDENTIFIER_PATTERN, stem))
        if not names or directory.is_symlink() or (run_dir / "control" / "answers").is_symlink():
            return
    except OSError:
        return
    for request_id in names[:MAX_WAITING]:
        if read_answer(run_dir, request_id) is not None:
            withdraw_request(run_dir, request_id)
            continue
        try:
            request = _read(directory / f"{request_id}.json", request_id)
        except FileNotFoundError:
            continue
        except DamagedRequest as error:
            yield request_id, error
        else:
            if request.kind in kinds:
                yield request_id, request


def _read(path: Path, request_id: str) -> AnyRequest:
    try:
        request = _REQUEST.validate_python(read_json(path, MAX_BYTES))
    except FileNotFoundError:
        raise
    except (OSError, UntrustedFileError, ValidationError) as error:
        raise DamagedRequest(f"{path} is no request: {error}") from error
    if request.request_id != request_id:
        raise DamagedRequest(f"{path}: request_id = {request.request_id!r}; expected {request_id!r}, the file's name")
    return request


def write_answer(run_dir: Path, answer: Answer, request: AnyRequest | None = None) -> None:
    """Answers a request durably, notes what it asked, if that is given, and removes it. Raises `OSError`."""
    path = _answer_path(run_dir, answer.request_id)
    (run_dir / "control").stat()
    make_shared(path.parent)
    asked = {} if request is None else {"kind": request.kind, "digest": _digest(request)}
    answer = answer.model_copy(update={"reason": printable(answer.reason)[:4000], **asked})
    write_atomically(path, dumps(answer.model_dump(mode="json")))
    withdraw_request(run_dir, answer.request_id)


def read_answer(run_dir: Path, request_id: str) -> Answer | None:
    """Returns the answer to a request; None if there is none. A damaged answer counts as a refusal."""
    path = _answer_path(run_dir, request_id)
    try:
        return Answer.model_validate(read_json(path, MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UntrustedFileError, ValidationError) as error:
        return Answer(request_id=request_id, outcome="refused", reason=f"{path} cannot be read: {error}")


def other_use(run_dir: Path, request: AnyRequest) -> str | None:
    """Returns which other request has this one's id, in words: one that waits or was answered. None if there is none."""
    answer = read_answer(run_dir, request.request_id)
    if answer is not None:
        kind, digest = answer.kind, answer.digest
    else:
        try:
            waiting = _read(_request_path(run_dir, request.request_id), request.request_id)
        except (FileNotFoundError, DamagedRequest):
            return None
        kind, digest = waiting.kind, _digest(waiting)
    if kind not in ("", request.kind):
        return repr(kind)
    return None if digest in ("", _digest(request)) else f"{kind!r} with other values"


def _digest(request: AnyRequest) -> str:
    values = request.model_dump(mode="json", exclude_defaults=True)
    return hashlib.sha256(dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _request_path(run_dir: Path, request_id: str) -> Path:
    return run_dir / "control" / "requests" / f"{request_id}.json"


def _answer_path(run_dir: Path, request_id: str) -> Path:
    return run_dir / "control" / "answers" / f"{request_id}.json"
