"""The `Context` of a worker in its own process: the members as last published, and requests to the PrimeMaster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter

from counterpoint.cluster.agent import protocol
from counterpoint.cluster.calls.group import RoleGroup
from counterpoint.cluster.spec import MASTER, role_of, sub_master_name
from counterpoint.cluster.worker import Context, Member
from counterpoint.cluster.worker_process.agent_link import AgentLink
from counterpoint.cluster.worker_process.description import Description
from counterpoint.cluster.worker_process.worker_calls import WorkerCalls

_MEMBERS = TypeAdapter(tuple[Member, ...])


def members_of(maps: Iterable[Any]) -> tuple[Member, ...]:
    """Returns the members that a message describes. Raises `ValueError`."""
    return _MEMBERS.validate_python(tuple(maps))


class HostedContext(Context):
    """What `Worker` gets here."""

    def __init__(self, description: Description, link: AgentLink, calls: WorkerCalls) -> None:
        super().__init__(
            job=description.job,
            role=description.role,
            rank=description.rank,
            count=description.count,
            worker=description.worker,
            incarnation=description.incarnation,
            config=description.config,
            directory=description.directory,
            node=description.node,
            fewest=description.fewest,
            most=description.most,
        )
        self._link = link
        self._calls = calls
        self._members: dict[str, Member] = {}

    def update(self, members: Iterable[Member]) -> None:
        """Takes news of members."""
        self._members = self._members | {member.worker: member for member in members}
        self._calls.update(self._members.values())

    def get_nodes_by_role(self, role: str) -> Sequence[Member]:
        """See `Context.get_nodes_by_role`."""
        own = [
            member
            for member in self._members.values()
            if role_of(member.worker) == role and member.worker != sub_master_name(role)
        ]
        return sorted(own, key=lambda member: int(member.worker.rpartition("-")[2]))

    def group(self, role: str) -> RoleGroup:
        """See `Context.group`."""
        return self._calls.group(role)

    def replace(self, worker: str, incarnation: int, reason: str) -> None:
        """See `Context.replace`."""
        if self.rank != -1 or role_of(worker) != self.role or worker == sub_master_name(self.role):
            raise PermissionError(
                f"{self.worker} may not have {worker} replaced: only {self.role}-{MASTER} may, a worker of its role"
            )
        self._link.send(protocol.REPLACE, worker=worker, incarnation=incarnation, reason=reason)

    def scale(self, count: int) -> None:
        """See `Context.scale`."""
        if self.rank != -1:
            raise PermissionError(
                f"{self.worker} may not change how many workers its role has: only {self.role}-{MASTER} may"
            )
        if not self.fewest <= count <= self.most:
            raise ValueError(f"role {self.role!r} may have {self.fewest} to {self.most} workers, not {count}")
        self._link.send(protocol.SCALE, count=count)

    def stop_job(self, reason: str, code: int = 0) -> None:
        """See `Context.stop_job`."""
        self._link.send(protocol.STOP_JOB, reason=reason, code=int(code))
