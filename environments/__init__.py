"""What a task is: examples, rollouts over turns, and scores. Built-in tasks, and the protocol for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transport.public_names import public_names

if TYPE_CHECKING:
    from environments.base import Environment as Environment
    from environments.base import EnvironmentContext as EnvironmentContext
    from environments.base import Example as Example
    from environments.base import Model as Model
    from environments.base import Reply as Reply
    from environments.base import ToolCall as ToolCall
    from environments.base import Unavailable as Unavailable
    from environments.chat import Chat as Chat
    from environments.config import EnvironmentConfig as EnvironmentConfig
    from environments.data.load import load_rows as load_rows
    from environments.gateway import Gateway as Gateway
    from environments.registry import load_environment as load_environment
    from environments.sampling import SamplingConfig as SamplingConfig
    from environments.seats.table import Table as Table
    from environments.tools.environment import ToolEnvironment as ToolEnvironment
    from environments.tools.play import play_with_tools as play_with_tools
    from environments.tools.sandbox.python_sandbox import Sandbox as Sandbox
    from environments.tools.sandbox.python_sandbox import SandboxUnavailable as SandboxUnavailable
    from transport.records import Rollout as Rollout
    from transport.records import Turn as Turn
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
