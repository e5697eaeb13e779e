"""What one operation of the API is: an `Endpoint`, with its parameters, its result and the function that answers it.

Everything that the page and the API read or change goes through one. A file `counterpoint/serve/api/<resource>.py` declares the
endpoints of a resource as `ENDPOINTS: tuple[Endpoint[Any, Any], ...]`, and `counterpoint/serve/app.py` lists these files. The
rest follows from the declaration: the route, the check of the parameters, who may call it, the cache, the deadline, and the entry
in the OpenAPI document. The contract of `answer`:

- It is a plain function `answer(jobs, parameters) -> result`, called in a thread. It may block on files, but should end within
  `seconds`: after that its caller gets an error (503), though the function runs on.
- It raises `NotFound` (404) for what is not there, `ChangeForbidden` (409) for what the state of a job forbids, and
  `transport.errors.UserError` (400) for a wrong value. Their text becomes a `Problem`. An `OSError` of a full disk becomes 507;
  anything else that it raises is our bug (500).
- What it reads is hostile: files are read with `transport/files/untrusted.py` or with bounds as strict; a run's directory comes
  from `Job.run_directory` (`counterpoint/serve/jobs.py`), and state that grows by reading from `Jobs.reading`.
- A reading endpoint is called at most once each `fresh_seconds` for the same parameters, however many viewers there are; its
  result is kept as bytes meanwhile. A changing endpoint is called for each request, after a line in the audit log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar, get_type_hints

from pydantic import BaseModel

from counterpoint.serve.errors import BadParameter, ChangeForbidden, NotFound
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config

__all__ = ["ROOT", "BadParameter", "ChangeForbidden", "Endpoint", "NotFound", "reads"]

Parameters = TypeVar("Parameters", bound=Config)
Result = TypeVar("Result", bound=BaseModel)

ROOT = "/api/v1"
"""The beginning of the endpoints' paths."""


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Parameters, Result]):
    """One operation of the API."""

    method: Literal["GET", "POST", "PUT", "DELETE"]
    """`GET` reads; the others change."""
    path: str
    """Below `/api/v1`, with the names of parameters in braces: `/jobs/{job}/runs/{run}/metrics`."""
    summary: str
    """One sentence for the OpenAPI document."""
    parameters: type[Parameters]
    """The names in the path are fields of it. The other fields are the query's of a `GET`, and else the JSON body's.
    A list is a query's name that is repeated."""
    result: type[Result]
    """The answer's JSON. Field docstrings become descriptions."""
    answer: Callable[[Jobs, Parameters], Result]
    """Called in a thread, as the module describes."""
    access: Literal["read", "change"] = "read"
    """`read`: any token. `change`: the admin token."""
    seconds: float = 10.0
    """The deadline of one answer."""
    fresh_seconds: float = 1.0
    """How long the answer to a reading request is given to others that ask the same. Any change forgets all answers."""
    is_urgent: bool = False
    """Whether it is a change that other changes must not keep waiting: what pauses or ends a run."""
    reads_records: bool = False
    """Whether it reads files of rollouts, which may have gigabytes: other reading requests must not wait for these."""

    is_check: bool = False
    """Whether it takes a core for many seconds: there is one at a time, and further ones are refused."""

    @property
    def threads(self) -> Literal["read", "records", "checks", "change", "urgent"]:
        """Which threads answer it."""
        if self.is_check:
            return "checks"
        if self.reads_records:
            return "records"
        return "urgent" if self.is_urgent else self.access

    @property
    def operation(self) -> str:
        """Its name in the OpenAPI document and in the audit log: `get /jobs/{job}`."""
        return f"{self.method.lower()} {self.path}"


def reads(
    path: str, summary: str, *, fresh_seconds: float = 1.0, reads_records: bool = False
) -> Callable[[Callable[[Jobs, Parameters], Result]], Endpoint[Parameters, Result]]:
    """Declares a function as an endpoint that reads, whose parameters and result are those of its signature."""

    def declare(answer: Callable[[Jobs, Parameters], Result]) -> Endpoint[Parameters, Result]:
        _, parameters, result = get_type_hints(answer).values()
        return Endpoint(
            "GET", path, summary, parameters, result, answer, fresh_seconds=fresh_seconds, reads_records=reads_records
        )

    return declare
