"""A program for the tests: `counterpoint tune` whose runs only pretend (`tests/tune/runs/fake_orchestrator.py`)."""

from __future__ import annotations

import sys

import counterpoint.job.admin.orchestrator_process
from counterpoint.cli.main import main

if __name__ == "__main__":
    counterpoint.job.admin.orchestrator_process.PROGRAM = (sys.executable, "-m", "tests.tune.runs.fake_orchestrator")
    sys.exit(main(["tune", *sys.argv[1:]]))
