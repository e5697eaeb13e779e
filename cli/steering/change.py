"""`counterpoint change RUN KEY=VALUE...`: new values of keys from the run's next step on."""

from __future__ import annotations

import json
from typing import Any

from cli.arguments.job import job_of
from cli.steering.arguments import parser_of, show
from job.admin.change import change_run, changeable_values
from transport.errors import UserError


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError`."""
    parser = parser_of(
        "change",
        "Gives keys of a run new values from its next step on, all of them or none. Without KEY=VALUE, lists the keys that may "
        "change, and the values that the next step has.",
    )
    parser.add_argument(
        "changes", nargs="*", metavar="KEY=VALUE", help="such as sampling.temperature=0.8; JSON or a word"
    )
    given = parser.parse_intermixed_args(arguments)  # --job may stand anywhere
    if not given.changes:
        values = changeable_values(job_of(given), given.run)
        return show(given, values, "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items()))
    changed = change_run(job_of(given), given.run, dict(_pair(word) for word in given.changes))
    words = ", ".join(f"{key} = {value!r}" for key, value in changed.changes.items())
    return show(given, changed, f"run {changed.run_id}, from step {changed.step} on: {words}")


def _pair(word: str) -> tuple[str, Any]:
    key, separator, value = word.partition("=")
    if not separator or not key:
        raise UserError(f"change: {word}: expected KEY=VALUE, such as sampling.temperature=0.8")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
