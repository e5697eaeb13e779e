"""Why a client's request is refused, beside what is wrong with what it says (`datums.BadRequest`)."""

from __future__ import annotations

from counterpoint.service.tinker.datums import BadRequest


class NoSuchThing(LookupError):
    """There is no such thing, or it is another client's."""


class Gone(LookupError):
    """The session has ended."""


class NotServed(BadRequest):
    """Something that this service does not do."""


class TooLarge(ValueError):
    """A request of more bytes, or more values, than are taken at once."""


class OverQuota(RuntimeError):
    """The owner has used up its quota. `ends_by_itself`: a client that waits can go on."""

    def __init__(self, message: str, *, ends_by_itself: bool = False) -> None:
        super().__init__(message)
        self.ends_by_itself = ends_by_itself
