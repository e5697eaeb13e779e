"""Why a client's request is refused, beside what is wrong with what it says (`datums.BadRequest`)."""

from __future__ import annotations

from counterpoint.service.tinker.datums import BadRequest


class NotFound(LookupError):
    """There is no such thing, or it is another client's."""


class Gone(LookupError):
    """The session has ended."""


class NotServed(BadRequest):
    """Something that this service does not do."""
