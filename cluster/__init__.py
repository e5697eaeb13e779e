"""Roles, workers and their supervision: a job of many workers on one machine or on Ray, which survives the death of any of them.

What users import is here, and is loaded when it is first used. The processes that the package starts by command are of its own
modules; of the users' code only the workers' classes are imported, in the workers' processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from cluster.backends.base import Backend as Backend
    from cluster.builder import JobBuilder as JobBuilder
    from cluster.builder import load_spec as load_spec
    from cluster.calls.call import Call as Call
    from cluster.calls.call import Calls as Calls
    from cluster.calls.group import RoleGroup as RoleGroup
    from cluster.calls.remote import remote as remote
    from cluster.channel.config import ChannelConfig as ChannelConfig
    from cluster.channel.consumer import ChannelConsumer as ChannelConsumer
    from cluster.channel.exactly_once import CommitFile as CommitFile
    from cluster.channel.exactly_once import CommittedPositions as CommittedPositions
    from cluster.channel.host import ChannelHost as ChannelHost
    from cluster.channel.link import ChannelError as ChannelError
    from cluster.channel.producer import ChannelProducer as ChannelProducer
    from cluster.channel.role import HostWorker as HostWorker
    from cluster.channel.self_loop import HOST_SECONDS as HOST_SECONDS
    from cluster.channel.self_loop import POLL_SECONDS as POLL_SECONDS
    from cluster.channel.self_loop import DataChannel as DataChannel
    from cluster.channel.self_loop import SelfLoopWorker as SelfLoopWorker
    from cluster.channel.self_loop import repeat as repeat
    from cluster.client.client import Client as Client
    from cluster.client.client import JobRequest as JobRequest
    from cluster.client.client import ResourceConfig as ResourceConfig
    from cluster.client.client import current_client as current_client
    from cluster.client.client import set_current_client as set_current_client
    from cluster.client.entrypoint import Entrypoint as Entrypoint
    from cluster.client.environment import ProcessEnvironment as ProcessEnvironment
    from cluster.client.environment import create_environment as create_environment
    from cluster.elastic.elastic_master import ElasticMaster as ElasticMaster
    from cluster.elastic.elastic_worker import ElasticWorker as ElasticWorker
    from cluster.elastic.progress import ProgressFile as ProgressFile
    from cluster.elastic.scaling import Progress as Progress
    from cluster.elastic.service import ServiceMaster as ServiceMaster
    from cluster.elastic.service import ServiceWorker as ServiceWorker
    from cluster.errors import ActorBusy as ActorBusy
    from cluster.errors import ActorDied as ActorDied
    from cluster.errors import ActorRestarting as ActorRestarting
    from cluster.errors import BackendError as BackendError
    from cluster.errors import CallError as CallError
    from cluster.errors import CallTimeout as CallTimeout
    from cluster.errors import CapacityError as CapacityError
    from cluster.errors import ClusterError as ClusterError
    from cluster.errors import JobExists as JobExists
    from cluster.errors import JobFailed as JobFailed
    from cluster.errors import NoSuchActor as NoSuchActor
    from cluster.errors import RemoteError as RemoteError
    from cluster.job_handle import JobHandle as JobHandle
    from cluster.job_handle import JobStatus as JobStatus
    from cluster.job_handle import PrimeMaster as PrimeMaster
    from cluster.job_handle import WorkerStatus as WorkerStatus
    from cluster.job_handle import submit as submit
    from cluster.manager.events import Outcome as Outcome
    from cluster.manager.manager import PrimeManager as PrimeManager
    from cluster.master.control import ControlError as ControlError
    from cluster.master.control import NoMaster as NoMaster
    from cluster.master.control import NotStarted as NotStarted
    from cluster.master.scheduler import Scheduler as Scheduler
    from cluster.spec import JobSpec as JobSpec
    from cluster.spec import Resources as Resources
    from cluster.spec import RestartScope as RestartScope
    from cluster.spec import RoleSpec as RoleSpec
    from cluster.worker import Context as Context
    from cluster.worker import Member as Member
    from cluster.worker import Stage as Stage
    from cluster.worker import SubMaster as SubMaster
    from cluster.worker import Worker as Worker
    from cluster.worker import WorkLoad as WorkLoad
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
