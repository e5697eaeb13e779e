"""`evaluations.jsonl` of a run: one line for each evaluation that has ended."""

from __future__ import annotations

from pathlib import Path

from counterpoint.transport.files.json_lines import read_lines

MOST_FAILED = 0.1
"""Share of failed rollouts above which a result says more about failures than about the policy."""

EVALUATIONS_FILE = "evaluations.jsonl"


def evaluated_steps(run_dir: Path) -> dict[str, int]:
    """Returns the newest evaluated step of each evaluation, by name. Blocks. Raises `OSError`."""
    newest: dict[str, int] = {}
    for _, line in read_lines(run_dir / EVALUATIONS_FILE):
        name, step = line.get("evaluation"), line.get("step")
        if isinstance(name, str) and isinstance(step, int):
            newest[name] = max(step, newest.get(name, 0))
    return newest
