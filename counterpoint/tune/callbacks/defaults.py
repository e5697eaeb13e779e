"""Which callbacks an experiment has without being told: the files that existing tools read."""

from __future__ import annotations

from collections.abc import Sequence

from counterpoint.tune.callbacks.callback import Callback
from counterpoint.tune.callbacks.csv_logger import CSVLoggerCallback
from counterpoint.tune.callbacks.json_logger import JsonLoggerCallback


def with_default_loggers(callbacks: Sequence[Callback] | None) -> list[Callback]:
    """The callbacks, and before them loggers for `params.json`, `result.json` and `progress.csv` where they have none."""
    given = list(callbacks or ())
    defaults = (JsonLoggerCallback, CSVLoggerCallback)
    return [kind() for kind in defaults if not any(isinstance(callback, kind) for callback in given)] + given
