"""A program for the tests: supervises the workers in a JSON file and prints, line by line, their states and the outcome. With a
number, logs of so many bytes are full."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path

from cluster import log_rotation
from cluster.events import Worker
from cluster.job import Job


def show(job: Job) -> None:
    job.rotate_full_logs()
    states = {view.name: asdict(view) for view in job.views()}
    print(json.dumps({"job": job.state, "workers": states}), flush=True)


def main() -> None:
    specifications = json.loads(Path(sys.argv[1]).read_text())
    workers = [Worker(**(spec | {"log_file": Path(spec["log_file"])})) for spec in specifications]
    if len(sys.argv) > 2:
        log_rotation.LOG_BYTES = int(sys.argv[2])
    outcome = asyncio.run(Job(workers, show).run())
    print(json.dumps({"outcome": asdict(outcome)}), flush=True)
    sys.exit(outcome.code)


if __name__ == "__main__":
    main()
