"""`counterpoint bench [NAME...]`: measures, and prints which bounds hold. The benchmarks, in `perf/`, are in a checkout alone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from transport.errors import UserError

CHECKOUT = Path(__file__).parents[1]


def main(arguments: list[str]) -> int:
    """Runs `perf/bench/__main__.py`; returns 1 if a bound is broken. Raises `UserError` where there is no checkout."""
    if not (CHECKOUT / "perf" / "bench").is_dir():
        raise UserError(
            "bench: the benchmarks are not part of the installed package. They run from a checkout of the repository: "
            "`make setup`, then `.venv/bin/counterpoint bench`"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.append(str(CHECKOUT))
    code: int = importlib.import_module("perf.bench.__main__").main(arguments)
    return code
