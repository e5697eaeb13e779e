"""A run's notice that its groups show no difference (`orchestrator/step/differences.py`). A guest may have written it."""

from __future__ import annotations

from pathlib import Path

from orchestrator.step.differences import NOTICE_FILE, Notice
from transport.files.untrusted import UntrustedFileError, read_json
from transport.printable import printable, shortened

MAX_BYTES = 2**14
"""The size of the file."""

LONGEST = 1000
"""Characters of each text."""


def read_notice(run_dir: Path) -> Notice | None:
    """Returns the notice; None without a usable one. Raises `OSError`."""
    try:
        values = read_json(run_dir / NOTICE_FILE, MAX_BYTES)
    except (FileNotFoundError, UntrustedFileError):
        return None
    groups, since = values.get("groups"), values.get("since")
    texts = values.get("reason"), values.get("advice")
    if type(groups) is not int or not 0 < groups < 2**53 or not isinstance(since, int | float) or not 0 <= since < 1e12:
        return None
    reason, advice = (shortened(printable(text), LONGEST) if isinstance(text, str) else "" for text in texts)
    return Notice(groups, reason, advice, float(since))
