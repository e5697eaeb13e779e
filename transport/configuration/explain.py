"""Makes a model of values from a TOML file, or an error that a person can act on.

The error names the origin of the value, its line in the file, the key, the value, what is allowed, and the nearest existing key.
`transport/configuration/lines.py` finds the line, and `transport/configuration/schema.py` the keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from counterpoint.transport.config import Config
from counterpoint.transport.configuration.lines import Lines, quoted
from counterpoint.transport.configuration.schema import ITEM, Key, keys_of, nearest, typed, valid_keys
from counterpoint.transport.configuration.toml_file import Table
from counterpoint.transport.errors import UserError

Model = TypeVar("Model", bound=Config)

_NAMED = re.compile(
    r"(?:run '(?P<run>[^']*)': )?"
    r"(?P<path>[a-z_]+(?:\.\w+|\[\d+\])*)"
    r"(?:: (?P<inner>\w+(?:\.\w+)*)(?= = ))?"
    r"(?:: environment '[^']*': (?P<key>kind|args)\b)?(?=: | = |$| )"
)
"""The key that the text of an error begins with."""


_BY_PROMETHEUS = (
    "there is none any more: Prometheus' Alertmanager sends alerts by the rules of deploy/prometheus/alerts.yml"
)
_BY_THE_PAGE = (
    "there are no traces for OpenTelemetry any more: the page and spans.jsonl have each step's spans (docs/serve.md)"
)
_BY_A_FILE = "there are no notes and tags any more: write a file into the run's directory"
GONE = {
    "alerts": _BY_PROMETHEUS,
    "broadcast": "weights are published as files; a link `run_<id>/broadcast` to a directory on tmpfs keeps them in memory",
    "tracing": _BY_THE_PAGE,
    "trace_rollouts": _BY_THE_PAGE,
    "notes": _BY_A_FILE,
    "tags": _BY_A_FILE,
}
"""Keys of earlier versions, and what a file that still has one is told."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Values that replace those of the file, such as flags."""

    values: Table
    written: Callable[[str], str]
    """How a key is written there: `trainer.threads` as `--trainer.threads`."""


def validate(model: type[Model], values: Table, origin: str, above: Sequence[Layer] = (), text: str = "") -> Model:
    """Makes the model of `values`.

    A value comes from the first of the layers `above` that has it, else from `origin`. `text` is the text of the file `origin`;
    errors quote its lines. Raises `UserError` that lists all errors at once.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        keys, every = keys_of(model), error.errors(include_url=False)
        homes = {_home(details, keys) for details in every}  # a key that is missing there stands in the wrong section
        places = {details["loc"] for details in every}
        reported = [
            one
            for one in every
            if (
                ".".join(map(str, one["loc"])) not in homes
                if one["type"] == "missing"
                else not _repeats(one, places, values) and not _follows(one, places)
            )
        ]
        lines = Lines(text)
        problems = [_explain(details, keys, origin, above, lines, values) for details in reported]
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        raise UserError(f"{count} in the configuration\n" + "\n".join(problems)) from None


def locate(message: str, values: Table, origin: str, above: Sequence[Layer] = (), text: str = "") -> str:
    """Returns `message`, preceded by where the key that it begins with is set, and followed by that line of the file.

    The message comes from a check of a valid configuration, whose values are `values`; the other arguments are those of
    `validate`. A message that begins with no key that is set is returned as it is.
    """
    unplaced, message = message, message.removeprefix(f"{origin}: ")
    found = _NAMED.match(message)
    if found is None:
        return unplaced
    runs: list[Any] = values["runs"] if isinstance(values.get("runs"), list) else []
    bases: list[list[str | int]] = [["orchestrator"], ["base"], ["run"], [], ["grid"]]
    bases += [[name, place] for name in ("zip", "targets") for place in range(len(values.get(name) or ()))]
    if found["run"] is not None:
        for position, run in enumerate(runs):
            if isinstance(run, dict) and run.get("run_id") == found["run"]:
                bases.insert(0, ["runs", position])
    place = _named_place(message, bases, values)
    if place is None:
        return unplaced
    where, shown_line = _where(place, values, origin, above, Lines(text))
    first, newline, rest = message.partition("\n")
    return f"{where}: {first}{shown_line}{newline}{rest}"


def _named_place(message: str, bases: Sequence[list[str | int]], values: Table) -> list[str | int] | None:
    """The place of the key that `message` begins with, or of the closest section around it that is set, below one of `bases`."""
    found = _NAMED.match(message)
    if found is None:
        return None
    names = re.findall(r"\w+", " ".join(part for part in found.group("path", "inner", "key") if part))
    parts: list[str | int] = [int(name) if name.isdigit() else name for name in names]
    for length in range(len(parts), 0, -1):  # the key itself below any of them, before a section around it
        for base in bases:
            if _held(values, [*base, *parts[:length]]) is not _NOTHING:
                return [*base, *parts[:length]]
    return None


def _where(
    location: list[str | int], values: Table, origin: str, above: Sequence[Layer], lines: Lines
) -> tuple[str, str]:
    """Where the value at `location` is set, and the line of the file, to append to a message; empty if it is no line's."""
    where = _origin(location, values, origin, above)
    if where == origin and (line := lines.of(location)) is not None:
        return f"{origin}:{line.number}:{line.column}", f"\n    {quoted(line.number, line.text)}"
    return where, ""


def _repeats(details: ErrorDetails, places: set[tuple[int | str, ...]], values: Table) -> bool:
    """Whether the error concerns a value that was copied from the top of the file, where the same error is reported."""
    return details["loc"][1:] in places and _held(values, list(details["loc"])) is _NOTHING


def _follows(details: ErrorDetails, places: set[tuple[int | str, ...]]) -> bool:
    """Whether a list counts as too short only because its entries have errors of their own."""
    place = details["loc"]
    return details["type"] == "too_short" and any(
        len(one) > len(place) and one[: len(place)] == place for one in places
    )


def _origin(path: list[str | int], values: Table, origin: str, above: Sequence[Layer]) -> str:
    """The name of the highest layer that has the value.

    A list is replaced whole, so one that has it also lacks what its entries lack. Of a section that several layers fill, `origin`
    is named.
    """
    listed = next((path[:place] for place, part in enumerate(path) if isinstance(part, int)), path)
    for layer in above:
        own = _held(layer.values, path)
        if path and isinstance(_held(layer.values, listed), list):
            return layer.written(".".join(map(str, listed)))
        if path and own is not _NOTHING and (not isinstance(own, dict) or own == _held(values, path)):
            return layer.written(".".join(map(str, path)))
    return origin


_NOTHING = object()


def _held(table: Any, path: list[str | int]) -> Any:
    """What a table has at a path; `_NOTHING` if it has no such place."""
    for part in path:
        held = range(len(table)) if isinstance(table, list) else table if isinstance(table, dict) else ()
        if part not in held:
            return _NOTHING
        table = table[part]
    return table


def _explain(
    details: ErrorDetails, keys: dict[str, Key], origin: str, above: Sequence[Layer], lines: Lines, values: Table
) -> str:
    """Describes one validation error."""
    location = _without_tags(list(details["loc"]), keys)
    shown = _show_path(location)
    pattern = ".".join(ITEM if isinstance(part, int) else part for part in location)
    is_section = isinstance(details["input"], dict)
    where, shown_line = _where(location, values, origin, above, lines)
    key = keys.get(pattern)
    if (home := _home(details, keys)) is not None:
        section, _, name = home.rpartition(".")
        written = (
            f"[[{home}]]" if keys[home].type == "list of tables" else f"[{home}]" if keys[home].is_section else name
        )
        below = "" if "[" in written else f" below [{section}]"
        return f"  {where}: {shown} belongs under [{section}]: write {written}{below}{shown_line}"
    if details["type"] == "extra_forbidden" and key is not None:
        advice = f"{_show_path(location[:-1])} of this kind has no such key; leave it out, or choose a kind that has it"
        return f"  {where}: {shown} = {_show(details['input'])}{shown_line}\n    {advice}"
    if details["type"] == "extra_forbidden" and (gone := GONE.get(pattern.rpartition(".")[2])) is not None:
        return f"  {where}: {shown}: {gone}"
    if details["type"] == "extra_forbidden":
        near = nearest(pattern, keys)
        numbers = ".".join(map(str, location))
        valid = ", ".join(valid_keys(pattern.rpartition(".")[0], keys))
        advice = f"the nearest is {_bracketed(typed(near, numbers))}" if near else f"valid: {valid}"
        return f"  {where}: {shown} = {_show(details['input'])}{shown_line}\n    unknown key; {advice}"
    if details["type"] == "missing":
        what = f": {key.type}. {key.description}" if key else ""
        return f"  {where}: {shown} is required and not set{what}"
    message = _message(details)
    if is_section and details["type"] == "value_error":  # of several keys: the message begins with the one to change
        bases = [location[:length] for length in range(len(location), -1, -1)]
        place = _named_place(message, bases, values)
        if place is not None and len(place) > len(location) and place[: len(location)] == location:
            where, shown_line = _where(place, values, origin, above, lines)
            return f"  {where}: {message}{shown_line}"
    if not location:
        return f"  {where}: {message}"
    meaning = f"\n    {key.path.rpartition('.')[2]}: {key.description}" if key and key.description else ""
    if is_section:
        return f"  {where}: {shown}: {message}{shown_line}"
    return f"  {where}: {shown} = {_show(details['input'])}{shown_line}\n    {message}{meaning}"


def _message(details: ErrorDetails) -> str:
    context = details.get("ctx", {})
    match details["type"]:
        case "union_tag_invalid":
            name = context["discriminator"].strip("'")
            return f"{name} = {context['tag']!r} is not known; expected one of {context['expected_tags']}"
        case "path_type":
            return "expected a path, written as text"
        case "tuple_type" | "list_type":
            return 'expected a list, such as [1, 2] or ["a", "b"]'
        case "model_type" | "dict_type" | "model_attributes_type":
            return "expected a section: write keys below it, or {} for its defaults"
        case "string_pattern_mismatch":
            return f"expected text that matches {context['pattern']}"
    return details["msg"].removeprefix("Value error, ").replace("Input should be", "expected")


def _home(details: ErrorDetails, keys: dict[str, Key]) -> str | None:
    """The full path of a section's key that stands at the top by mistake; None for any other error."""
    if details["type"] != "extra_forbidden" or len(details["loc"]) != 1:
        return None
    return next((key for key in keys if key.count(".") == 1 and key.partition(".")[2] == details["loc"][0]), None)


def _without_tags(location: list[str | int], keys: dict[str, Key]) -> list[str | int]:
    """Removes from a location the tags that pydantic adds for discriminated unions (`filters.0.gibberish.mode`)."""
    kept: list[str | int] = []
    for position, part in enumerate(location):
        pattern = ".".join(ITEM if isinstance(one, int) else one for one in [*kept, part])
        is_last = position == len(location) - 1
        is_prefix = any(key == pattern or key.startswith(f"{pattern}.") for key in keys)
        above = keys.get(".".join(ITEM if isinstance(one, int) else one for one in kept))
        is_name = above is not None and above.is_free  # of an entry, such as of an opponent
        if isinstance(part, int) or is_last or is_prefix or is_name:
            kept.append(part)
    return kept


def _show_path(location: list[str | int]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _bracketed(path: str) -> str:
    return _show_path([int(part) if part.isdigit() else part for part in path.split(".")])


def _show(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 80 else f"{text[:77]}..."
