"""Roles, workers and their supervision: a job of many workers on one machine or on Ray, which survives the death of any of them.

What users import is here, and is loaded when it is first used. The processes that the package starts by command are of its own
modules; of the users' code only the workers' classes are imported, in the workers' processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cluster.builder import JobBuilder, load_spec
    from cluster.calls import Call, Calls, RoleGroup, remote
    from cluster.channel import (
        ChannelConfig,
        ChannelConsumer,
        ChannelError,
        ChannelHost,
        ChannelProducer,
        CommitFile,
        CommittedPositions,
    )
    from cluster.channel.self_loop import DataChannel, SelfLoopWorker
    from cluster.errors import (
        ActorBusy,
        ActorDied,
        ActorRestarting,
        BackendError,
        CallError,
        CallTimeout,
        CapacityError,
        ClusterError,
        JobFailed,
        NoSuchActor,
        RemoteError,
    )
    from cluster.job_handle import JobHandle, JobStatus, PrimeMaster, WorkerStatus, submit
    from cluster.manager.events import Outcome
    from cluster.master.control import ControlError, NoMaster
    from cluster.spec import JobSpec, Resources, RestartScope, RoleSpec
    from cluster.worker import Context, Member, Stage, SubMaster, Worker, WorkLoad

_HOMES = {
    "cluster.builder": ("JobBuilder", "load_spec"),
    "cluster.calls": ("Call", "Calls", "RoleGroup", "remote"),
    "cluster.channel": (
        "ChannelConfig",
        "ChannelConsumer",
        "ChannelError",
        "ChannelHost",
        "ChannelProducer",
        "CommitFile",
        "CommittedPositions",
    ),
    "cluster.channel.self_loop": ("DataChannel", "SelfLoopWorker"),
    "cluster.errors": (
        "ActorBusy",
        "ActorDied",
        "ActorRestarting",
        "BackendError",
        "CallError",
        "CallTimeout",
        "CapacityError",
        "ClusterError",
        "JobFailed",
        "NoSuchActor",
        "RemoteError",
    ),
    "cluster.job_handle": ("JobHandle", "JobStatus", "PrimeMaster", "WorkerStatus", "submit"),
    "cluster.manager.events": ("Outcome",),
    "cluster.master.control": ("ControlError", "NoMaster"),
    "cluster.spec": ("JobSpec", "Resources", "RestartScope", "RoleSpec"),
    "cluster.worker": ("Context", "Member", "Stage", "SubMaster", "WorkLoad", "Worker"),
}

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ActorBusy",
    "ActorDied",
    "ActorRestarting",
    "BackendError",
    "Call",
    "CallError",
    "CallTimeout",
    "Calls",
    "CapacityError",
    "ChannelConfig",
    "ChannelConsumer",
    "ChannelError",
    "ChannelHost",
    "ChannelProducer",
    "ClusterError",
    "CommitFile",
    "CommittedPositions",
    "Context",
    "ControlError",
    "DataChannel",
    "JobBuilder",
    "JobFailed",
    "JobHandle",
    "JobSpec",
    "JobStatus",
    "Member",
    "NoMaster",
    "NoSuchActor",
    "Outcome",
    "PrimeMaster",
    "RemoteError",
    "Resources",
    "RestartScope",
    "RoleGroup",
    "RoleSpec",
    "SelfLoopWorker",
    "Stage",
    "SubMaster",
    "WorkLoad",
    "Worker",
    "WorkerStatus",
    "load_spec",
    "remote",
    "submit",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cluster' has no {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)
