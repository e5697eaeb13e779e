"""Keys of a run's configuration that change while it is trained: which they are, and the journal `control/changes.json`.

The orchestrator decides the step from which a change holds, and journals it before it commits that step; the trainer reads the
journal when it updates the weights. So both go over at the same step, also after any kill, and a step that is trained again has
the values that it had. A change stays in force when the run is resumed, over the value in its file; where that value was edited
since, the file's holds from the next step on (`edits`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from counterpoint.run.config import RunConfig, default_buffer
from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.configuration.schema import ITEM, is_known, keys_of, nearest
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.format_number import OtherFormatError, check_format
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

JOURNAL = "changes.json"

FORMAT = 1

MAX_BYTES = 2**20
"""The size of the journal."""

LEARNING_RATE = "training.learning_rate"
"""The one key that the trainer applies."""

CAPACITY = "schedule.max_inflight_rollouts"

LOG_LEVEL = "log_level"

CHANGEABLE = (
    LEARNING_RATE, "advantage.*", "sampling.*", "filters", CAPACITY, LOG_LEVEL, "environments.<name>.ratio",
    "evaluations.<name>.share",
)  # fmt: skip
"""The keys that can be changed, for messages."""


class ChangeRefused(ValueError):
    """A change that cannot be made while the run is trained; the message names every key and its reason."""


class JournalError(ValueError):
    """A journal that cannot be used; the message names it."""


class Change(Config):
    """New values of some keys, from one step on."""

    request_id: Identifier
    """The id of the request."""
    step: int = Field(ge=1)
    """The first step with the new values."""
    changes: dict[str, Any]
    """The new values, by dotted key."""
    given: dict[str, Any] = {}
    """The values that the run's file had for these keys."""


def apply(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration with the new values. Raises `ChangeRefused`."""
    table = config.model_dump(mode="json")
    refused: list[str] = []
    for key, value in changes.items():
        try:
            place, name = _place(table, key)
            place[name] = value  # an unknown name is refused with the table
        except ChangeRefused as error:
            refused.append(str(error))
    if refused:
        raise ChangeRefused("; ".join(refused))
    try:
        changed = RunConfig.model_validate(table)
    except ValidationError as error:
        raise ChangeRefused(
            "; ".join(_sentence(each, changes, config) for each in error.errors(include_url=False))
        ) from error
    kind = changed.advantage.kind
    if ":" in kind and kind != config.advantage.kind:
        raise ChangeRefused(
            f"advantage.kind = {kind!r} is an import path: only the run's file may name one; write it there, and resume the run"
        )
    return changed


def completed(config: RunConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the changes with what they imply: another longest completion is another `advantage.overlong` by default.

    Raises `ChangeRefused`.
    """
    given = given_overlong(config)
    if given is None or "advantage.overlong" in changes:
        return dict(changes)
    after = apply(config, {**changes, "advantage.overlong": given}).advantage.overlong
    if after is None or after == config.advantage.overlong:
        return dict(changes)
    return {**changes, "advantage.overlong": after.model_dump(mode="json")}


def given_overlong(config: RunConfig) -> dict[str, Any] | None:
    """Returns `advantage.overlong` without the values that follow from the longest completion; None if it is unset."""
    if config.advantage.overlong is None:
        return None
    table = config.advantage.overlong.model_dump(mode="json")
    defaults = {"longest": config.longest_completion, "buffer": default_buffer(table["longest"])}
    return {name: value for name, value in table.items() if value != defaults.get(name)}


def _sentence(error: ErrorDetails, changes: Mapping[str, Any], config: RunConfig) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        near = get_close_matches(key, changeable_keys(config), n=1)
        return f"there is no key {key}" + (f"; did you mean {near[0]}?" if near else "")
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return f"{key} = {changes[key]!r}: {message}" if key in changes else f"{key}: {message}"


def values_of(config: RunConfig, keys: Iterable[str]) -> dict[str, Any]:
    """Returns the configuration's values of changeable keys, for JSON. Raises `ChangeRefused` for a key that it does not have."""
    table = config.model_dump(mode="json")
    places = {key: _place(table, key) for key in keys}
    return {key: place.get(name) for key, (place, name) in places.items()}


def changeable_keys(config: RunConfig) -> list[str]:
    """Returns the keys of the configuration that may change."""
    return [
        LEARNING_RATE,
        *(f"advantage.{name}" for name in type(config.advantage).model_fields),
        *(f"sampling.{name}" for name in type(config.sampling).model_fields),
        "filters",
        CAPACITY,
        LOG_LEVEL,
        *(f"environments.{environment.name}.ratio" for environment in config.environments),
        *(f"evaluations.{evaluation.name}.share" for evaluation in config.evaluations),
    ]


def fixed_values(config: RunConfig) -> dict[str, Any]:
    """Returns the configuration without the keys that may change, as a table for JSON."""
    table = config.model_dump(mode="json")
    for key in changeable_keys(config):
        place, name = _place(table, key)
        place.pop(name, None)
    return table


def without_removed(config: RunConfig, changes: Iterable[Change]) -> list[Change]:
    """Returns the changes without the keys of environments and evaluations that the configuration no longer has."""

    def kept(values: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in values.items() if not _is_removed(config, key)}

    return [
        change.model_copy(update={"changes": kept(change.changes), "given": kept(change.given)}) for change in changes
    ]


def _is_removed(config: RunConfig, key: str) -> bool:
    names = {
        "environments": [each.name for each in config.environments],
        "evaluations": [each.name for each in config.evaluations],
    }
    section, _, rest = key.partition(".")
    return section in names and rest.rpartition(".")[0] not in names[section]


def edits(config: RunConfig, changes: Sequence[Change]) -> dict[str, Any]:
    """Returns the values of `config`, a run's file, that were edited since the changes of these keys. Raises `ChangeRefused`."""
    given = {key: value for change in changes for key, value in change.given.items()}
    return {key: value for key, value in values_of(config, given).items() if value != given[key]}


def kept(config: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Returns what was changed while the run was trained and still holds, by key: its value, and the file's.

    `config` is the run's file. Raises `JournalError` or `ChangeRefused`.
    """
    journal = without_removed(config, read_journal(config.run_dir))
    values = in_force(journal, config.steps) | edits(config, journal)
    given = values_of(config, values)
    return {key: (value, given[key]) for key, value in values.items() if value != given[key]}


def read_journal(run_dir: Path) -> list[Change]:
    """Returns the changes in the order in which they were made. Raises `JournalError`."""
    path = run_dir / "control" / JOURNAL
    try:
        content = read_json(path, MAX_BYTES)
        check_format(content.get("format"), FORMAT)
        return [Change.model_validate(entry) for entry in content["changes"]]
    except FileNotFoundError:
        return []
    except (OSError, UntrustedFileError, ValidationError, KeyError, TypeError, ValueError) as error:
        advice = "" if isinstance(error, OtherFormatError) else ". Remove it to go on with the configuration as given"
        raise JournalError(f"{path} cannot be used: {error}{advice}") from error


def write_journal(run_dir: Path, changes: Sequence[Change]) -> None:
    """Replaces the journal. Raises `OSError`, and `ChangeRefused` for one that could not be read again."""
    content = {"format": FORMAT, "changes": [change.model_dump(mode="json") for change in changes]}
    try:
        data = dumps(content)
    except TypeError as error:  # too deep
        raise ChangeRefused(f"the change cannot be journalled: {error}") from error
    if len(data) > MAX_BYTES:
        raise ChangeRefused(
            f"the run's changes would have {len(data)} bytes; at most {MAX_BYTES} are journalled. Put them into its file"
        )
    write_atomically(run_dir / "control" / JOURNAL, data)


def begun_at(changes: Iterable[Change], step: int) -> dict[str, Any]:
    """Returns the values that hold from `step` on and did not before, by key."""
    values: dict[str, Any] = {}
    for change in changes:
        if change.step == step:
            values |= change.changes
    return values


def in_force(changes: Iterable[Change], step: int) -> dict[str, Any]:
    """Returns the values that were changed and hold at `step`, by key."""
    values: dict[str, Any] = {}
    for change in changes:
        if change.step <= step:
            values |= change.changes
    return values


@dataclass(slots=True)
class LearningRates:
    """The learning rates of one run that changes have set, read again when the journal is another file."""

    run_dir: Path
    _identity: tuple[int, int, int] | None = None
    _changes: Sequence[Change] = ()

    def at(self, step: int) -> float | None:
        """Returns the peak learning rate of `step`; None if no change has set it. Raises `JournalError`."""
        try:
            found = (self.run_dir / "control" / JOURNAL).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # such as a link that leads to itself
            raise JournalError(f"{self.run_dir / 'control' / JOURNAL} cannot be read: {error.strerror}") from error
        identity = (found.st_mtime_ns, found.st_size, found.st_ino)
        if identity != self._identity:
            self._changes, self._identity = read_journal(self.run_dir), identity
        rate = in_force(self._changes, step).get(LEARNING_RATE)
        if rate is None:
            return None
        if type(rate) not in (int, float) or not 0 < rate < float("inf"):
            raise JournalError(
                f"{self.run_dir / 'control' / JOURNAL}: {LEARNING_RATE} = {rate!r}; expected a number above 0"
            )
        return float(rate)


def _place(table: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Returns where the table has a changeable key: the table that holds it, and its name there. Raises `ChangeRefused`."""
    match key.split("."):
        case ["training", "learning_rate"]:
            return table["training"], "learning_rate"
        case [("advantage" | "sampling") as section, name]:
            return table[section], name
        case [("filters" | "log_level") as name]:
            return table, name
        case ["schedule", "max_inflight_rollouts"]:
            return table["schedule"], "max_inflight_rollouts"
        case ["environments", *parts, "ratio"] if parts:
            return _named(table, "environments", parts, key), "ratio"
        case ["evaluations", *parts, "share"] if parts:
            return _named(table, "evaluations", parts, key), "share"
    allowed = f"those that can change while the run is trained are {', '.join(CHANGEABLE)}"
    keys = keys_of(RunConfig)
    if is_known(key, keys):
        raise ChangeRefused(f"{key} cannot change; {allowed}")
    near = nearest(key, keys)
    meant = f"; did you mean {near.replace(ITEM, '<name>')}?" if near else "."
    raise ChangeRefused(f"a run has no key {key}{meant} Of its keys, {allowed}")


def _named(table: dict[str, Any], section: str, parts: Sequence[str], key: str) -> dict[str, Any]:
    """Returns the entry of a list of tables with a name, which may have dots. Raises `ChangeRefused`."""
    named = ".".join(parts)
    for entry in table[section]:
        if entry["name"] == named:
            found: dict[str, Any] = entry
            return found
    raise ChangeRefused(f"{key}: the run has no {section.removesuffix('s')} {named!r}")
