"""Benchmarks, chaos tests and demos. They are not installed: the processes that they start find them in this checkout."""

import os
from pathlib import Path

_CHECKOUT = str(Path(__file__).parents[1])
_there = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
if _CHECKOUT not in _there:
    os.environ["PYTHONPATH"] = os.pathsep.join([_CHECKOUT, *_there])
