"""What can be wrong with an experiment, as its user is to be told."""

from __future__ import annotations


class TuneError(Exception):
    """An experiment, a trial or a configuration is wrong, or cannot go on; the message says what, where and what to do."""


class AbortTrialExecution(TuneError):
    """A trial can never be restored, as it was given to the tuner: its trainable has no way to begin from a checkpoint."""


def in_one_line(message: str | None) -> str:
    """The line of a trial's error that says most: of a traceback what was raised, of anything else the first line."""
    lines = [line for line in (message or "").splitlines() if line.strip()]
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if begins:
        raised = [line for line in lines[begins[-1] + 1 :] if not line.startswith(" ")]
        lines = raised or lines
    return lines[0].strip() if lines else ""
