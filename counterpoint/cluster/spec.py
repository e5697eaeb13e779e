"""What a job is: its roles, how many workers each has, what they need, and how their deaths are handled.

The pure `counterpoint/cluster/manager` decides by it, and a backend places by it. Worker names follow from it: `<role>-<rank>`,
and `<role>-master` for a role's SubMaster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints, field_serializer, model_validator

from counterpoint.transport.config import Config, Identifier
from counterpoint.transport.process.notify import period_of as notify_period

RoleName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,95}$")]
"""A role's name: letters, digits, `_`, `.`, `-`, 96 characters at most. A worker's rank follows the last `-` of its name."""

ImportPath = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""`package.module:Class`, with a colon before the class."""


LONGEST_PERIOD_SECONDS = 2.0
"""Longest time between two heartbeats of a worker of a class, even if its role allows a longer one, so that a status is fresh."""

BEATS_IN_THE_LIMIT = 4
"""Its heartbeats in the silence that the role allows: two may be lost or late, and the worker is still heard in time."""


class RestartScope(StrEnum):
    """What is started again when a worker of the role dies."""

    WORKER = "worker"
    """The worker alone is restarted."""
    ROLE = "role"
    """Every worker of its role."""
    JOB = "job"
    """Every worker of the job."""


class StartGate(StrEnum):
    """What has to be READY before a worker begins its work."""

    WORKER = "worker"
    """The worker itself: its work is what others need to become ready. Its SubMaster, if it has one, checks the workers at work,
    and roles that start after this one wait until it has passed them."""
    JOB = "job"
    """The whole job."""


class Resources(Config):
    """What one worker needs. A backend reserves it; it does not limit the worker to it."""

    cpu: float = Field(default=0.0, ge=0)
    """The number of cores."""
    gpu: float = Field(default=0.0, ge=0)
    """The number of accelerators."""
    memory_bytes: int = Field(default=0, ge=0)
    """The memory, in bytes."""
    custom: dict[str, float] = Field(default_factory=dict)
    """Further resources of the nodes, by name."""


class RoleSpec(Config):
    """One role: a named kind of worker. Exactly one of `worker` and `command` is set."""

    name: RoleName
    """The role's name, unique in the job."""
    count: int = Field(default=1, ge=1)
    """Workers at the start; an elastic role may have between `min_count` and `max_count` later."""
    min_count: int | None = Field(default=None, ge=1)
    """Fewest workers the role can go on with. Unset: `count`."""
    max_count: int | None = Field(default=None, ge=1)
    """Most workers the role may grow to. Unset: `count`."""
    worker: ImportPath | None = None
    """The import path of a subclass of `cluster.Worker`: `package.module:Class`."""
    command: tuple[str, ...] | None = None
    """A list of any program and its arguments. Unless `notifies = false` it must send `READY=1` as systemd's services do."""
    notifies: bool = True
    """False, for a command only: it sends neither readiness nor heartbeats, is ready once started, and has no such timeouts."""
    restart_arguments: tuple[str, ...] = ()
    """Added to `command` when a worker is started again."""
    sub_master: ImportPath | None = None
    """The import path of a subclass of `cluster.SubMaster`, of which one worker manages this role."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Given to every worker of the role as `context.config`. JSON values only; a tuple arrives as a list."""
    resources: Resources = Resources()
    """What each worker needs."""
    collocate: Identifier | None = None
    """The collocation group: all workers of all roles with the same group are placed on one node, all or none."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables added to each worker's environment."""
    task: bool = False
    """True: each worker does a part of the job's work and ends once it is complete; the job ends when all tasks have. False: a
    service, which runs until then."""
    essential: bool = True
    """False, for a service: the job goes on without it once it has died more often in a row than `max_restarts`, and its end is
    never a failure of the job."""
    after: tuple[RoleName, ...] = ()
    """Roles, listed earlier, whose workers must be ready before a worker of this role is created."""
    start: StartGate = StartGate.JOB
    """What has to be ready before `start` of a worker, or of the SubMaster, is called. A command begins by itself."""
    restart: RestartScope = RestartScope.WORKER
    """What is started again when one of its workers dies."""
    max_restarts: int = Field(default=3, ge=0)
    """How often in a row a worker is started again after it died; then it fails for good."""
    ready_timeout_seconds: float | None = Field(default=120.0, gt=0)
    """Longest time from the start of a worker's process to its being ready; infinite for one with deadlines of its own. None,
    for a command only: it does not notify, and is ready once started."""
    silence_timeout_seconds: float | None = Field(default=15.0, gt=0)
    """Longest time without a heartbeat; then the worker is suspected, killed, and replaced. None: it sends none."""
    stop_timeout_seconds: float = Field(default=30.0, gt=0)
    """Longest time from the request to stop to its end; then it is killed."""
    nice: int = Field(default=0, ge=0, le=19)
    """Added to the niceness, once the worker is ready; from its start on for a command that does not notify."""
    log_file: Path | None = None
    """The file to which the output of its worker of rank 0 is appended; those of other ranks, and the SubMaster, have a
    file beside it, with the rank or `master` in its name (`trainer-1.log`). Unset: `logs/<worker>.log` in the job's
    directory."""

    @model_validator(mode="before")
    @classmethod
    def _without_timeouts(cls, given: Any) -> Any:
        """A file cannot say None."""
        if isinstance(given, dict) and given.get("notifies") is False:
            return {"ready_timeout_seconds": None, "silence_timeout_seconds": None} | given
        return given

    @field_serializer("ready_timeout_seconds", when_used="json")
    def _infinity_as_text(self, seconds: float | None) -> float | str | None:
        """JSON has no infinity, and null means something else here."""
        return "inf" if seconds is not None and math.isinf(seconds) else seconds

    @model_validator(mode="after")
    def _consistent(self) -> RoleSpec:
        if (self.worker is None) == (self.command is None):
            raise ValueError(f"role {self.name!r} needs exactly one of `worker` (an import path) and `command`")
        if self.command is not None and not self.command:
            raise ValueError(f"role {self.name!r}: `command` is empty; expected a program and its arguments")
        if self.command is not None and self.sub_master is not None:
            raise ValueError(f"role {self.name!r}: a SubMaster manages workers of a class, not commands")
        if not self.essential and (self.task or self.sub_master is not None):
            raise ValueError(f"role {self.name!r}: only a service without a SubMaster can be `essential = false`")
        if self.worker is not None and (self.ready_timeout_seconds is None or not self.notifies):
            raise ValueError(f"role {self.name!r}: only a command can be ready without a notification")
        if not self.notifies and (self.ready_timeout_seconds or self.silence_timeout_seconds):
            raise ValueError(
                f"role {self.name!r}: leave the timeouts out, which a command without notifications cannot keep"
            )
        if not self.fewest <= self.count <= self.most:
            raise ValueError(
                f"role {self.name!r}: count = {self.count} is not between min_count = {self.fewest} and max_count = {self.most}"
            )
        return self

    @property
    def fewest(self) -> int:
        """Fewest workers."""
        return self.count if self.min_count is None else self.min_count

    @property
    def most(self) -> int:
        """Most workers."""
        return self.count if self.max_count is None else self.max_count

    @property
    def heartbeat_seconds(self) -> float | None:
        """The time between two heartbeats of a worker; None if none is expected."""
        limit = self.silence_timeout_seconds
        if limit is None:
            return None
        if self.command is not None:
            return notify_period(limit)
        return min(LONGEST_PERIOD_SECONDS, limit / BEATS_IN_THE_LIMIT)

    @property
    def worker_names(self) -> tuple[str, ...]:
        """The names of the workers at the start, by rank."""
        return tuple(worker_name(self.name, rank) for rank in range(self.count))

    def log_of(self, worker: str) -> Path | None:
        """Returns where the output of one of its workers is appended; None without a `log_file`."""
        rank = worker.rpartition("-")[2]
        if self.log_file is None or rank == "0":
            return self.log_file
        return self.log_file.with_name(f"{self.log_file.stem}-{rank}{self.log_file.suffix}")


class JobSpec(Config):
    """A job: roles in the order in which they start. Its tasks stop first, then its services, in reverse order (`stop_order`)."""

    name: Identifier
    """The id of the job."""
    roles: tuple[RoleSpec, ...] = Field(min_length=1)
    """The roles of the job."""
    stay: bool = False
    """Whether the services run on after all tasks have ended, until a stop request."""
    lease_seconds: float = Field(default=10.0, ge=2.0)
    """How long the job goes on without a master: then a standby may take over, and keepers stop their workers in order."""

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        earlier: set[str] = set()
        for role in self.roles:
            if role.name in earlier:
                raise ValueError(f"two roles are called {role.name!r}; give each a name of its own")
            if unknown := [name for name in role.after if name not in earlier]:
                raise ValueError(f"role {role.name!r} starts after {unknown}, which must be roles listed before it")
            earlier.add(role.name)
        for channel in (channel for role in self.roles for channel in _channels_in(role.config)):
            for producer in channel["producers"]:
                self._check_producer(channel["name"], producer)
        for role in self.roles:
            if not role.essential and role.name in self.linked_by_channels:
                raise ValueError(
                    f"role {role.name!r} has to do with a channel, whose ends would wait for ever without it; leave "
                    "`essential = false` out"
                )
        managed = {sub_master_name(role.name) for role in self.roles if role.sub_master is not None}
        if taken := sorted(earlier & managed):
            raise ValueError(f"role {taken[0]!r} has the name of another role's SubMaster; give it another one")
        return self

    def _check_producer(self, channel: str, producer: str) -> None:
        """Raises `ValueError` for a producer that its role does not always have: the channel's stream would never end.

        Likewise for a role that may grow: the channel would refuse its further workers.
        """
        role = next((role for role in self.roles if role.name == role_of(producer)), None)
        rank = producer.rpartition("-")[2]
        if role is not None and role.most > role.fewest:
            raise ValueError(
                f"role {role.name!r}: the producers of channel {channel!r} are its workers by name, so their number cannot "
                f"change; leave min_count = {role.fewest} and max_count = {role.most} out"
            )
        if role is not None and rank.isdecimal() and int(rank) >= role.count:
            raise ValueError(
                f"channel {channel!r} ends once {producer!r} has ended, but role {role.name!r} has only {role.count} workers; "
                f"name {role.name}-0 to {role.name}-{role.count - 1}"
            )

    @property
    def linked_by_channels(self) -> frozenset[str]:
        """The roles that have an end of a channel, by any role's `config`; without one's workers the others wait for ever."""
        found = {role.name: list(_channels_in(role.config)) for role in self.roles}
        every = [channel for channels in found.values() for channel in channels]
        producers = {role_of(name) for channel in every for name in channel["producers"]}
        return frozenset(name for name, channels in found.items() if channels or name in producers)

    def role(self, name: str) -> RoleSpec:
        """Returns the role of that name. Raises `KeyError`."""
        for role in self.roles:
            if role.name == name:
                return role
        raise KeyError(name)

    def stop_order(self) -> dict[str, int]:
        """Returns a number for each service and SubMaster, by role: the lowest, 1, stop first, and equal ones at once.

        The order is the reverse of that in which they are listed, since a service may need those before it to end well.
        Commands that do not start after one another do not: such neighbours stop together.
        """
        order: dict[str, int] = {}
        together: list[RoleSpec] = []
        for role in reversed([role for role in self.roles if not role.task or role.command is None]):
            alone = any(None in (role.command, other.command) or role.name in other.after for other in together)
            together = [role] if alone else [*together, role]
            order[role.name] = max(order.values(), default=0) + (alone or not order)
        return order


def _channels_in(value: Any) -> Iterator[dict[str, Any]]:
    """Yields the channels in a role's `config`: tables with a `name` and `producers`, as `ChannelConfig` has them."""
    if isinstance(value, dict):
        name, producers = value.get("name"), value.get("producers")
        if isinstance(producers, list | tuple) and all(isinstance(each, str) for each in (name, *producers)):
            yield value
        for inner in value.values():
            yield from _channels_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _channels_in(inner)


MASTER = "master"
"""Stands in a SubMaster's name where a worker's has its rank."""


def worker_name(role: str, rank: int) -> str:
    """Returns the name of the role's worker of that rank."""
    return f"{role}-{rank}"


def sub_master_name(role: str) -> str:
    """Returns the name of the role's SubMaster."""
    return f"{role}-{MASTER}"


def role_of(worker: str) -> str:
    """Returns the role of a worker or SubMaster."""
    return worker.rpartition("-")[0]
