"""The formats in which a trial's model can be exported. The names are those of Ray Tune 1.x."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from counterpoint.tune.errors import TuneError


class ExportFormat(StrEnum):
    """What `export_formats` may name; `Trainable.export_model` writes them."""

    CHECKPOINT = "checkpoint"
    MODEL = "model"
    ONNX = "onnx"
    H5 = "h5"


def check_formats(formats: Iterable[str] | None) -> list[str]:
    """Returns the formats as strings. Raises `TuneError` for one that there is not."""
    known = [each.value for each in ExportFormat]
    given = [formats] if isinstance(formats, str) else list(formats or ())
    for each in given:
        if each not in known:
            raise TuneError(f"export_formats: there is no format {each!r}; expected some of {', '.join(known)}")
    return [str(each) for each in given]
