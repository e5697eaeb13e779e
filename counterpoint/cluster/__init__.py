"""Roles, workers and their supervision: a job of many workers on one machine or on Ray, which survives the death of any of them.

What users import is here, and is loaded when it is first used. The processes that the package starts by command are of its own
modules; of the users' code only the workers' classes are imported, in the workers' processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.cluster.backends.base import Backend as Backend
    from counterpoint.cluster.builder import JobBuilder as JobBuilder
    from counterpoint.cluster.builder import load_spec as load_spec
    from counterpoint.cluster.calls.call import Call as Call
    from counterpoint.cluster.calls.call import Calls as Calls
    from counterpoint.cluster.calls.group import RoleGroup as RoleGroup
    from counterpoint.cluster.calls.remote import remote as remote
    from counterpoint.cluster.channel.config import ChannelConfig as ChannelConfig
    from counterpoint.cluster.channel.consumer import ChannelConsumer as ChannelConsumer
    from counterpoint.cluster.channel.exactly_once import CommitFile as CommitFile
    from counterpoint.cluster.channel.exactly_once import CommittedPositions as CommittedPositions
    from counterpoint.cluster.channel.host import ChannelHost as ChannelHost
    from counterpoint.cluster.channel.host import HostWorker as HostWorker
    from counterpoint.cluster.channel.messages import ChannelError as ChannelError
    from counterpoint.cluster.channel.producer import ChannelProducer as ChannelProducer
    from counterpoint.cluster.channel.self_loop import HOST_SECONDS as HOST_SECONDS
    from counterpoint.cluster.channel.self_loop import POLL_SECONDS as POLL_SECONDS
    from counterpoint.cluster.channel.self_loop import DataChannel as DataChannel
    from counterpoint.cluster.channel.self_loop import SelfLoopWorker as SelfLoopWorker
    from counterpoint.cluster.channel.self_loop import repeat as repeat
    from counterpoint.cluster.client import Client as Client
    from counterpoint.cluster.client import JobRequest as JobRequest
    from counterpoint.cluster.client import ProcessEnvironment as ProcessEnvironment
    from counterpoint.cluster.client import ResourceConfig as ResourceConfig
    from counterpoint.cluster.client import create_environment as create_environment
    from counterpoint.cluster.client import current_client as current_client
    from counterpoint.cluster.client import set_current_client as set_current_client
    from counterpoint.cluster.elastic.elastic_master import ElasticMaster as ElasticMaster
    from counterpoint.cluster.elastic.elastic_worker import ElasticWorker as ElasticWorker
    from counterpoint.cluster.elastic.progress import ProgressFile as ProgressFile
    from counterpoint.cluster.elastic.scaling import Progress as Progress
    from counterpoint.cluster.elastic.service import ServiceMaster as ServiceMaster
    from counterpoint.cluster.elastic.service import ServiceWorker as ServiceWorker
    from counterpoint.cluster.entrypoint import Entrypoint as Entrypoint
    from counterpoint.cluster.errors import ActorBusy as ActorBusy
    from counterpoint.cluster.errors import ActorDied as ActorDied
    from counterpoint.cluster.errors import ActorRestarting as ActorRestarting
    from counterpoint.cluster.errors import BackendError as BackendError
    from counterpoint.cluster.errors import CallError as CallError
    from counterpoint.cluster.errors import CallTimeout as CallTimeout
    from counterpoint.cluster.errors import CapacityError as CapacityError
    from counterpoint.cluster.errors import ClusterError as ClusterError
    from counterpoint.cluster.errors import JobExists as JobExists
    from counterpoint.cluster.errors import JobFailed as JobFailed
    from counterpoint.cluster.errors import NoSuchActor as NoSuchActor
    from counterpoint.cluster.errors import RemoteError as RemoteError
    from counterpoint.cluster.job_handle import JobHandle as JobHandle
    from counterpoint.cluster.job_handle import PrimeMaster as PrimeMaster
    from counterpoint.cluster.job_handle import submit as submit
    from counterpoint.cluster.job_status import JobStatus as JobStatus
    from counterpoint.cluster.job_status import WorkerStatus as WorkerStatus
    from counterpoint.cluster.manager.events import Outcome as Outcome
    from counterpoint.cluster.manager.manager import PrimeManager as PrimeManager
    from counterpoint.cluster.master.control import ControlError as ControlError
    from counterpoint.cluster.master.control import NoMaster as NoMaster
    from counterpoint.cluster.master.control import NotStarted as NotStarted
    from counterpoint.cluster.master.scheduler import Scheduler as Scheduler
    from counterpoint.cluster.spec import JobSpec as JobSpec
    from counterpoint.cluster.spec import Resources as Resources
    from counterpoint.cluster.spec import RestartScope as RestartScope
    from counterpoint.cluster.spec import RoleSpec as RoleSpec
    from counterpoint.cluster.worker import Context as Context
    from counterpoint.cluster.worker import Member as Member
    from counterpoint.cluster.worker import Stage as Stage
    from counterpoint.cluster.worker import SubMaster as SubMaster
    from counterpoint.cluster.worker import Worker as Worker
    from counterpoint.cluster.worker import WorkLoad as WorkLoad
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
