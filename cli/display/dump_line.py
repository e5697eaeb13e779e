"""A written dump in one line, as `synthesize` and `import-dump` print it."""

from __future__ import annotations

from pathlib import Path

from orchestrator.rollouts.dump import DumpHeader


def describe_dump(directory: Path, header: DumpHeader, seconds: float) -> str:
    """Describes a dump that was written in `seconds`."""
    nbytes = sum(header.files.values())
    return f"{directory}: {header.rollouts} rollouts, {header.turns} turns, {nbytes / 1e9:.3g} GB in {seconds:.1f} s"
