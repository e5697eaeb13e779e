"""`counterpoint make-model NAME...`: builds a built-in model, or finds a hub model or a directory, and prints its directory."""

from __future__ import annotations

import logging
import sys

from counterpoint.transport.errors import UserError

USAGE = """usage: counterpoint make-model NAME...

NAME is a built-in model (tiny-moe, tiny-dense, tiny-math, smollm2), a hub name or a directory. Prints one directory a line."""


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError` for a model that does not exist, or without torch."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    from counterpoint.models.build import resolve_model

    for name in arguments:
        try:
            print(resolve_model(name), flush=True)
        except ValueError as error:
            raise UserError(str(error)) from None
    return 0
