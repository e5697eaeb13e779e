"""What the API answers when it cannot do what was asked: a `Problem`, the same for the page, for `curl` and for programs.

`counterpoint/serve/app.py` turns every error into one.
"""

from __future__ import annotations

import errno

from pydantic import BaseModel


class Problem(BaseModel):
    """What is wrong with a request."""

    what: str
    """What is wrong, for a person."""
    where: str = ""
    """The parameter, or the part of the request, that it concerns."""
    value: str = ""
    """The value that was given, shortened."""
    expected: str = ""
    """What is allowed there."""
    advice: str = ""
    """The advice about what to do."""


class ProblemAnswer(BaseModel):
    """The body of every answer whose status is 400 or above."""

    error: Problem
    """The sentence that says what is wrong."""


class ApiError(Exception):
    """An error that the caller of the API is told, with its status."""

    status = 400

    def __init__(self, what: str, *, where: str = "", value: str = "", expected: str = "", advice: str = "") -> None:
        """Takes the fields of a `Problem`."""
        super().__init__(what)
        self.problem = Problem(what=what, where=where, value=value[:200], expected=expected, advice=advice)


class BadParameter(ApiError):
    """A parameter is wrong."""


class NotFound(ApiError):
    """There is no such job, run, step, or whatever is asked for."""

    status = 404


class ChangeForbidden(ApiError):
    """The state of the job forbids the change."""

    status = 409


class Overdue(ApiError):
    """An answer takes too long."""

    status = 503

    def __init__(self, operation: str, seconds: float) -> None:
        """`operation` took more than `seconds`."""
        super().__init__(
            f"{operation} took more than {seconds:g} s",
            advice="ask again later; if it stays so, see whether the disk of the job's directory answers",
        )


class Overloaded(ApiError):
    """More is asked than can be computed."""

    status = 503

    def __init__(self) -> None:
        super().__init__("too many different answers are being computed", advice="ask again later")


class StorageFull(ApiError):
    """A change could not be written. Nothing has changed."""

    status = 507

    def __init__(self, what: str) -> None:
        """`what` is the system's message."""
        super().__init__(f"nothing was changed: {what}", advice="make room on that disk, and ask again")


class Unexpected(ApiError):
    """A bug of ours. The log has the traceback."""

    status = 500

    def __init__(self) -> None:
        super().__init__("this failed, by an error in the program", advice="see the log of `counterpoint serve`")


def is_full(error: OSError) -> bool:
    """Whether there is no room on the disk, or none left of a quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Unauthorized(ApiError):
    """No token, or a wrong one."""

    status = 401

    def __init__(self) -> None:
        super().__init__(
            "no valid token",
            where="Authorization",
            expected="Bearer TOKEN",
            advice="the tokens are in the files that `counterpoint serve` names when it starts",
        )


class Forbidden(ApiError):
    """This caller may not do that."""

    status = 403


class BodyTooLarge(ApiError):
    """The request's body is too large."""

    status = 413


class WrongType(ApiError):
    """The request's body is not declared as JSON."""

    status = 415


class RateLimited(ApiError):
    """Requests come too fast."""

    status = 429

    def __init__(self, seconds: float) -> None:
        """`seconds` until the next may come."""
        super().__init__("too many requests", advice=f"ask again in {seconds:.1f} s")
        self.seconds = seconds
