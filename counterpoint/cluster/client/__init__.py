"""Jobs made of one function: requested, submitted and waited for from a program, as `client.submit(JobRequest(...)).wait()`.

Each is a job of one role with one worker, whose process calls the function. A job of several roles is made by `JobBuilder`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.cluster.client.client import Client as Client
    from counterpoint.cluster.client.client import JobRequest as JobRequest
    from counterpoint.cluster.client.client import ResourceConfig as ResourceConfig
    from counterpoint.cluster.client.client import current_client as current_client
    from counterpoint.cluster.client.client import set_current_client as set_current_client
    from counterpoint.cluster.client.entrypoint import Entrypoint as Entrypoint
    from counterpoint.cluster.client.environment import ProcessEnvironment as ProcessEnvironment
    from counterpoint.cluster.client.environment import create_environment as create_environment
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
