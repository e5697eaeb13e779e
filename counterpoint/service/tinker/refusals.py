"""Reasons to refuse a client's request."""

from __future__ import annotations


class BadRequest(ValueError):
    """A request that cannot be carried out. The message is for its client."""


class NoSuchThing(LookupError):
    """It does not exist, or is another client's."""


class Gone(LookupError):
    """The session has ended."""


class NotServed(BadRequest):
    """This service does not do it."""


class TooLarge(ValueError):
    """A request of more bytes, or more values, than the service takes at once."""


class OverQuota(RuntimeError):
    """The owner has used up its quota. `ends_by_itself`: a client that waits can go on."""

    def __init__(self, message: str, *, ends_by_itself: bool = False) -> None:
        super().__init__(message)
        self.ends_by_itself = ends_by_itself
