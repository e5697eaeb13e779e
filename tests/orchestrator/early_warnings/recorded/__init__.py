"""The metrics of small runs, real ones, each with a fault that was made on purpose, and a healthy one, as they were recorded.

`python -m perf.small_runs constant_answer_wins limit_of_4_tokens rate_30_times_too_high stale_server wrong_clip --healthy 1
--steps 45 --out tests/orchestrator/early_warnings/recorded` makes them again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def recorded(name: str) -> list[dict[str, Any]]:
    """A line for each step."""
    columns = [json.loads(text) for text in (Path(__file__).parent / f"{name}.jsonl").read_text().splitlines()]
    steps = range(len(columns[0][1]))
    rows = ({metric: values[place] for metric, values in columns if values[place] is not None} for place in steps)
    return [{"step": step, **row} for step, row in enumerate(rows, 1)]
