"""The same calls to an actor of Ray, in a process of their own: `calls.py` compares with them.

    python -m perf.bench.cluster.ray_calls

Prints `ready` once the actor answers. Then for each line `latency N`, `bulk N BYTES` or `rate N` on standard input it makes so
many calls and prints one line of JSON: the seconds of each call, or of all together. Ends with its input.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

import numpy as np
import ray


class Echo:
    """The actor."""

    def echo(self, value: object) -> object:
        """Returns what it is given."""
        return value


def main() -> None:
    """Answers standard input. Ray may write what it likes to standard error."""
    answers, sys.stdout = sys.stdout, sys.stderr
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=512 * 2**20,
    )
    actor = ray.remote(Echo).options(num_cpus=0).remote()
    ray.get(actor.echo.remote(0))
    _print(answers, "ready")
    for line in sys.stdin:
        what, *numbers = line.split()
        count = int(numbers[0])
        value: object = np.zeros(int(numbers[1]), np.uint8) if what == "bulk" else 1
        if what == "rate":
            began = time.perf_counter()
            ray.get([actor.echo.remote(index) for index in range(count)])
            _print(answers, time.perf_counter() - began)
            continue
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            ray.get(actor.echo.remote(value))
            seconds.append(time.perf_counter() - began)
        _print(answers, seconds)


def _print(file: TextIO, value: object) -> None:
    print(json.dumps(value), file=file, flush=True)


if __name__ == "__main__":
    main()
