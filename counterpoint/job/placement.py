"""Where a job's roles may be on a Ray cluster: which of them have to be on one node, and what each one reserves there.

Roles that find each other by an address of their own machine are placed together: vLLM and the orchestrators unless
`inference.host` is a wildcard, the trainer and the orchestrators unless `transport.address` has one. Roles that share a GPU
are placed together, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from counterpoint.cluster.spec import Resources
from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.sections import JobSections
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.loopback import WILDCARD_HOSTS, is_loopback
from counterpoint.transport.wires.endpoint import IPC, is_everywhere

SERVERS_FILE = "servers.txt"
"""File in the job's directory with the servers' present URLs, one a line, if they may be on any node."""

GROUP = "job"
"""The name of the collocation group."""

CPUS = 1.0
"""Reserved for a server and for the trainer. Orchestrators need little."""


@dataclass(frozen=True, slots=True)
class Placement:
    """What the roles of a kind reserve, and whether they are in the collocation group."""

    resources: Resources = field(default_factory=Resources)
    collocate: str | None = None


def servers_move(job: JobSections) -> bool:
    """Whether the servers' addresses are known only once Ray has placed them."""
    return job.backend == "ray" and job.inference.replicas > 0 and job.inference.host in WILDCARD_HOSTS


def servers_file(job: JobSections) -> Path:
    """Returns where the servers' addresses are written then."""
    return job.output_dir.absolute() / SERVERS_FILE


def placements(job: JobSections) -> Mapping[str, Placement]:
    """Returns the placement of a role by `inference_<position>`, `trainer`, and `orchestrator` for each of them.

    On this machine nothing is reserved, and nothing can be apart.
    """
    if job.backend == "local":
        return {name: Placement() for name in (*devices(job), "orchestrator")}
    gpus = shares(job)
    shared = any(amount != int(amount) for amount in gpus.values())
    with_servers = shared or (job.inference.replicas > 0 and not servers_move(job))
    with_trainer = shared or not is_everywhere(job.transport.address)
    placed = {
        name: Placement(Resources(cpu=CPUS, gpu=amount), GROUP if _is_in(name, with_servers, with_trainer) else None)
        for name, amount in gpus.items()
    }
    return placed | {"orchestrator": Placement(collocate=GROUP if with_servers or with_trainer else None)}


def _is_in(name: str, with_servers: bool, with_trainer: bool) -> bool:
    return with_trainer if name == "trainer" else with_servers


def shares(job: JobSections) -> dict[str, float]:
    """Returns how many GPUs each server and each node of the trainer reserve: whole ones, or a part of one that they share."""
    used = devices(job)
    users = Counter(device for its in used.values() for device in its)
    amounts = {name: float(len(its)) if _are_own(its, users) else 1 / users[its[0]] for name, its in used.items()}
    return amounts | {"trainer": amounts["trainer"] / (job.trainer.nodes if amounts["trainer"] >= 1 else 1)}


def devices(job: JobSections) -> dict[str, list[int]]:
    """Returns the GPUs of each server and of the trainer by `[gpus]`. Without it they share one, if the trainer needs one."""
    given, each = job.gpus, job.inference.tensor_parallel_size
    shared = [0] if job.trainer.device == "cuda" and given.inference is None and given.trainer is None else []
    servers = {
        f"inference_{position}": shared
        if given.inference is None
        else given.inference[position * each : (position + 1) * each]
        for position in range(job.inference.replicas)
    }
    return servers | {"trainer": shared if given.trainer is None else given.trainer}


def check_placement(job: JobSections) -> None:
    """Raises `ValueError` for what cannot run on Ray: an address of one certain machine, or GPUs that Ray cannot share out.

    On this machine, only a trainer on a CPU can have several nodes.
    """
    nodes = job.trainer.nodes
    if job.backend == "local":
        if nodes > 1 and job.trainer.device != "cpu":
            raise ValueError(
                f"trainer.nodes = {nodes} are all on this machine, whose GPUs they would share: use trainer.processes, or "
                'trainer.device = "cpu"'
            )
        return
    if nodes > 1 and len(devices(job)["trainer"]) % nodes:
        raise ValueError(
            f"gpus.trainer = {job.gpus.trainer} cannot be divided among trainer.nodes = {nodes}; name as many for each node"
        )
    host, address = job.inference.host, job.transport.address
    if job.inference.replicas and not is_loopback(host) and host not in WILDCARD_HOSTS:
        raise ValueError(
            f'inference.host = {host!r} is one machine\'s address, and with backend = "ray" Ray chooses the node: use 127.0.0.1 '
            "(vLLM and the orchestrators are then placed on one node) or 0.0.0.0"
        )
    if address is not None and not _stays(address) and not is_everywhere(address):
        raise ValueError(
            f'transport.address = {address!r} is one machine\'s address, and with backend = "ray" Ray chooses the node: leave it '
            "out (trainer and orchestrators are then placed on one node), or write tcp://0.0.0.0:PORT"
        )
    used = devices(job)
    users = Counter(device for its in used.values() for device in its)
    for name, its in used.items():
        if not _are_own(its, users) and len(its) > 1:
            raise ValueError(
                f"gpus: {name} has {its}, of which others have some, too; on Ray, roles may share a GPU only if each of them has "
                "no other"
            )


def _are_own(its: list[int], users: Mapping[int, int]) -> bool:
    return all(users[device] == 1 for device in its)


def _stays(address: str) -> bool:
    """Whether a ZMQ endpoint is reached from its own machine only."""
    return address.startswith(IPC) or is_loopback(address.removeprefix("tcp://").rpartition(":")[0].strip("[]"))


class ServersFile:
    """The file of the servers' addresses, for one job. Nothing is written for servers whose addresses are in the configuration.

    The job's supervisor writes it whenever Ray has placed a server; the orchestrators watch it (`inference.urls_file`).
    """

    def __init__(self, config: JobSections) -> None:
        self.path = servers_file(config)
        self._scheme = config.inference.scheme
        moving = range(config.inference.replicas) if servers_move(config) else ()
        self._ports = {f"inference_{position}": config.inference.port + position for position in moving}
        self._nodes: dict[str, str] = {}
        self._written: str | None = None

    def write(self, state: State, workers: Sequence[WorkerView]) -> None:
        """Writes where the servers are; one that is being placed anew stays listed where it was. Raises `OSError`."""
        if not self._ports:
            return
        from counterpoint.cluster.backends.ray_places import address_of  # for no job on this machine alone

        self._nodes |= {worker.name: worker.node for worker in workers if worker.node and worker.name in self._ports}
        urls = [
            f"{self._scheme}://{address_of(self._nodes[name])}:{port}\n"
            for name, port in self._ports.items()
            if name in self._nodes
        ]
        if (text := "".join(urls)) != self._written:
            write_atomically(self.path, text.encode())
            self._written = text
