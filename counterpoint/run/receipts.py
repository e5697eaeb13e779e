"""The chain that receipts are: each line of `receipts.jsonl` has the hash of the line before (`docs/receipts.md`).

An orchestrator writes one for each step, a driven run one for each item. `counterpoint/verify/` checks both without this code.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from counterpoint.transport.files.json_lines import lines_from_end

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


def digest_of_probe(probe: Mapping[str, Any]) -> str:
    """Returns one hash for the digests that a trainer published for weights. Raises `AttributeError` for what is no probe."""
    lines = sorted(
        f"{precision} {layer} {value}\n"
        for precision, layers in probe.get("digests", {}).items()
        for layer, value in layers.items()
    )
    return hashlib.sha256("".join(lines).encode()).hexdigest()
