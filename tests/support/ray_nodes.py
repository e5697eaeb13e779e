"""A Ray cluster of several nodes on this machine, in a process of its own: Ray must not be in that of the tests.

`python -m tests.support.ray_nodes COUNT` starts a head without CPUs and so many nodes, prints the head's address, and for each
line of its input, the name of a node (`cluster.backends.ray_places.node_name`), kills that node and prints `gone`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from counterpoint.cluster.remains import MARK
from counterpoint.transport.process.launch import live_processes
from tests.support.polling import DEADLINE_SECONDS

NODE = {"object_store_memory": 80_000_000, "include_dashboard": False}


class RayNodes:
    """The cluster, from outside. `close` it."""

    def __init__(self, count: int) -> None:
        began = time.monotonic()
        while not self._start(count):
            assert time.monotonic() - began < DEADLINE_SECONDS, "no Ray cluster starts"

    def _start(self, count: int) -> bool:
        """Tries to start the cluster, and returns whether it has. A raylet waits half a minute for its agent, whatever is set."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ray_nodes", str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0"},
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        if not self.address:
            self.close()
        return bool(self.address)

    def remove(self, node: str) -> None:
        """Kills the node of that name."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{node}\n")
        self._process.stdin.flush()
        assert self._line() == "gone"

    def close(self) -> None:
        """Ends the cluster."""
        self._process.communicate(timeout=DEADLINE_SECONDS)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        assert line, "the Ray cluster has ended"
        return line


@contextmanager
def ray_files() -> Iterator[str]:
    """A directory for all that Ray writes in this process. It is short, since it has sockets.

    Else Ray keeps the address of the machine's newest cluster in `/tmp/ray`: it fails where that is missing, and clusters of
    tests beside each other take the file away from one another.
    """
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as files:
        os.mkdir(os.path.join(files, "ray"))
        # Within these a raylet's own processes, and those of its workers, must have started.
        os.environ["RAY_agent_register_timeout_ms"] = str(int(1000 * DEADLINE_SECONDS))  # noqa: SIM112
        os.environ["RAY_worker_register_timeout_seconds"] = str(int(DEADLINE_SECONDS))  # noqa: SIM112
        os.environ["RAY_TMPDIR"] = files
        yield files


def workers_on_ray(job: str) -> dict[int, str]:
    """The processes of a job's workers (`ray_places.job_key`), each with its actor's name, process and start."""
    wanted, found = f"{MARK}={job}/", dict[int, str]()
    for pid, *_ in live_processes():
        with suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            found.update((pid, entry.partition("=")[2]) for entry in entries if entry.startswith(wanted))
    return found


def main(count: int) -> None:
    """Runs the cluster until the end of the input."""
    from ray.cluster_utils import Cluster

    from counterpoint.cluster.backends.ray_places import _ID_CHARACTERS

    with ray_files() as files:
        cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0, "temp_dir": files})
        try:
            nodes: dict[str, Any] = {}
            for _ in range(count):
                node = cluster.add_node(**NODE, num_cpus=2)
                nodes[node.node_id[:_ID_CHARACTERS]] = node
            print(cluster.address, flush=True)
            for line in sys.stdin:
                cluster.remove_node(nodes[line.strip().rpartition("-")[2]], allow_graceful=False)
                print("gone", flush=True)
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
