"""The file of the servers' addresses, for a job whose servers may be on any node of a Ray cluster (`job/placement.py`).

The job's supervisor writes it whenever Ray has placed a server; the orchestrators watch it (`inference.urls_file`).
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.backends.ray_places import address_of
from cluster.worker_view import State, WorkerView
from job.config import JobConfig
from job.placement import servers_file, servers_move
from transport.files.atomic import write_atomically


class ServersFile:
    """The file of one job. Nothing is written for servers whose addresses are in the configuration."""

    def __init__(self, config: JobConfig) -> None:
        self.path = servers_file(config)
        self._scheme = config.inference.scheme
        moving = range(config.inference.replicas) if servers_move(config) else ()
        self._ports = {f"inference_{position}": config.inference.port + position for position in moving}
        self._nodes: dict[str, str] = {}
        self._written: str | None = None

    def write(self, state: State, workers: Sequence[WorkerView]) -> None:
        """Writes where the servers are; one that is being placed anew stays listed where it was. Raises `OSError`."""
        self._nodes |= {worker.name: worker.node for worker in workers if worker.node and worker.name in self._ports}
        urls = [
            f"{self._scheme}://{address_of(self._nodes[name])}:{port}\n"
            for name, port in self._ports.items()
            if name in self._nodes
        ]
        if self._ports and (text := "".join(urls)) != self._written:
            write_atomically(self.path, text.encode())
            self._written = text
