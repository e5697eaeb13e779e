"""The chain that receipts are: each line of `receipts.jsonl` has the hash of the line before (`docs/receipts.md`).

An orchestrator writes one for each step, a driven run one for each item. `counterpoint/verify/` checks both without this code.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from counterpoint.transport.files.json_lines import lines_from_end
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

logger = logging.getLogger(__name__)

RECEIPTS_FILE = "receipts.jsonl"

FORMAT = 1

MOST_PROBE_BYTES = 16 * 2**20
"""Most bytes of a `probe.json` that is read for a receipt."""


def newest_receipt(path: Path) -> tuple[str, dict[str, Any]]:
    """Returns the hash of the last whole line of a file and its object; empty without any. Raises `OSError`."""
    found = ((head_of(raw), line) for _, raw, line in lines_from_end(path) if line is not None)
    return next(found, ("", {}))


def head_of(line: bytes) -> str:
    """Returns the hash of a receipt's line: SHA-256 of its bytes, without the newline."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def published_weights(directory: Path) -> str | None:
    """Returns one hash for the digests that a trainer published with weights; None if these are gone, or with a warning."""
    try:
        probe = read_json(directory / "probe.json", MOST_PROBE_BYTES)
        lines = sorted(
            f"{precision} {layer} {value}\n"
            for precision, layers in probe.get("digests", {}).items()
            for layer, value in layers.items()
        )
    except (FileNotFoundError, NotADirectoryError):
        return None  # the trainer has removed them
    except (UntrustedFileError, AttributeError) as error:
        logger.warning("no receipt names the weights %s: %s", directory, error)
        return None
    return hashlib.sha256("".join(lines).encode()).hexdigest()
