"""Records of one kilobyte through `ray.util.queue.Queue`, for comparison: one process of the case `cluster-channel`.

    python -m perf.bench.cluster.ray_queue RECORDS BYTES

Producer and consumer are tasks of their own, as the queue's users are. Prints the records a second as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import ray
from ray.util.queue import Queue


def main(count: int, size: int) -> None:
    """Measures, from the first record that arrives to the last."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    queue = Queue(maxsize=1024)

    def produce() -> None:
        record = b"x" * size
        for _ in range(count):
            queue.put(record)

    def consume() -> float:
        queue.get()
        began = time.perf_counter()
        for _ in range(count - 1):
            queue.get()
        return (count - 1) / (time.perf_counter() - began)

    reader: Any = ray.remote(consume).remote()
    ray.get(ray.remote(produce).remote())
    print(json.dumps(ray.get(reader)))
    ray.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
