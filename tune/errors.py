"""What can be wrong with an experiment, as its user is to be told."""

from __future__ import annotations


class TuneError(Exception):
    """An experiment, a trial or a configuration is wrong, or cannot go on; the message says what, where and what to do."""
