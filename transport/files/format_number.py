"""The number of a file's format: what a reader says of a file that another version of this software wrote.

A number is raised when a reader of the former one could not read the file, or would read it wrongly; a field with a default
raises nothing.
"""

from __future__ import annotations


class OtherFormatError(ValueError):
    """A file of another version: whole, and not to be removed."""


def check_format(found: object, reads: int, oldest: int | None = None) -> None:
    """Raises `OtherFormatError` for the number of another version's format, and `ValueError` for what is no number.

    The reader reads `reads`, and what was written since `oldest` if that is given.
    """
    if type(found) is not int:
        raise ValueError(f"its format is {found!r:.80}; expected the number {reads}")
    if not (reads if oldest is None else oldest) <= found <= reads:
        other = "a newer" if found > reads else "an older"
        raise OtherFormatError(
            f"{other} version of Counterpoint wrote it: it has format {found}, and this version reads {reads}. Go on with a "
            "version that reads it (docs/operations.md, Versions), or start in another directory"
        )
