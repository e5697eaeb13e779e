"""Events and states of an experiment as MessagePack: what the journal and the snapshots hold. NaN and infinity survive."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import msgpack
import msgspec

from counterpoint.transport.typed import met
from counterpoint.tune.checkpoint import Checkpoint
from counterpoint.tune.errors import TuneError
from counterpoint.tune.resources import Resources
from counterpoint.tune.runner.events import Event
from counterpoint.tune.runner.progress import TrialProgress
from counterpoint.tune.trial import TRAINABLE_OF_RUNS, Trial

_CLASSES = {kind.__name__: kind for kind in typing.get_args(Event)}
_FIELDS = {kind: tuple(each.name for each in dataclasses.fields(kind)) for kind in _CLASSES.values()}


def encode(event: Event) -> bytes:
    """Returns an event's bytes. Raises `TypeError`, `ValueError` or `OverflowError` for a value that is no data."""
    kind = type(event)
    return pack([kind.__name__, *(getattr(event, name) for name in _FIELDS[kind])])


def decode(data: list[Any]) -> Event:
    """Returns the event of what was unpacked. Raises `TuneError` for one of another version."""
    name, *values = data
    kind = _CLASSES.get(name)
    if kind is None or len(values) != len(_FIELDS[kind]):
        raise TuneError(f"the journal has an event {name!r} of another version of this program")
    fields = dict(zip(_FIELDS[kind], values, strict=True))
    if fields.get("checkpoint") is not None:
        fields["checkpoint"] = Checkpoint(**fields["checkpoint"])
    if "trials" in fields:
        fields["trials"] = tuple(map(trial_of, fields["trials"]))
    if "trial" in fields:
        fields["trial"] = trial_of(fields["trial"])
    if "needs" in fields:
        fields["needs"] = tuple(fields["needs"])
    event: Event = kind(**fields)
    return event


def pack(value: Any) -> bytes:
    """Returns the bytes of data that may hold trials, checkpoints and progress."""
    packed: bytes = msgpack.packb(value, default=_plain)
    return packed


def unpack(data: bytes | memoryview) -> Any:
    """Returns what was packed, with dicts for these."""
    return msgpack.unpackb(data, strict_map_key=False)


def trial_of(fields: dict[str, Any]) -> Trial:
    """The trial of `Trial.as_dict`, as packed and unpacked."""
    log = fields["log_to_file"]
    trial = Trial(
        **{
            **fields,
            "trainable_name": TRAINABLE_OF_RUNS,  # its own may be registered later, or by nobody who only reads
            "resources": Resources(**fields["resources"]),
            "checkpoint": msgspec.convert(fields["checkpoint"], met(Checkpoint | None)),
            "checkpoints": msgspec.convert(fields["checkpoints"], met(list[Checkpoint])),
            "log_to_file": tuple(log) if isinstance(log, list) else log,
        }
    )
    trial.trainable_name = fields["trainable_name"]
    return trial


def _plain(value: Any) -> Any:
    if isinstance(value, Trial):
        return value.as_dict()
    if isinstance(value, Checkpoint | TrialProgress):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    raise TypeError(f"{value!r} is a {type(value).__module__}.{type(value).__qualname__}, and not JSON")
