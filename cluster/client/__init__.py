"""Jobs made of one function: requested, submitted and waited for from a program, as `client.submit(JobRequest(...)).wait()`.

Each is a job of one role with one worker, whose process calls the function. A job of several roles is made by `JobBuilder`.
"""

from cluster.client.client import Client, JobRequest, current_client, set_current_client
from cluster.client.entrypoint import Entrypoint
from cluster.client.environment import ProcessEnvironment, create_environment
from cluster.spec import Resources as ResourceConfig

__all__ = [
    "Client",
    "Entrypoint",
    "JobRequest",
    "ProcessEnvironment",
    "ResourceConfig",
    "create_environment",
    "current_client",
    "set_current_client",
]
