"""The scheduler that stops nothing: trials start in the order in which they were added, and run to their end."""

from __future__ import annotations

from tune.schedulers.scheduler import TrialScheduler


class FIFOScheduler(TrialScheduler):
    """First in, first out."""
