"""What a task is: examples, rollouts over turns, and scores. Built-in tasks, and the protocol for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterpoint.public_names import public_names

if TYPE_CHECKING:
    from counterpoint.environments.base import Environment as Environment
    from counterpoint.environments.base import EnvironmentContext as EnvironmentContext
    from counterpoint.environments.base import Example as Example
    from counterpoint.environments.base import Model as Model
    from counterpoint.environments.base import Reply as Reply
    from counterpoint.environments.base import ToolCall as ToolCall
    from counterpoint.environments.base import Unavailable as Unavailable
    from counterpoint.environments.chat import Chat as Chat
    from counterpoint.environments.config import EnvironmentConfig as EnvironmentConfig
    from counterpoint.environments.data.load import load_rows as load_rows
    from counterpoint.environments.gateway import Gateway as Gateway
    from counterpoint.environments.reward import Reward as Reward
    from counterpoint.environments.sampling import SamplingConfig as SamplingConfig
    from counterpoint.environments.sandbox.python_sandbox import Sandbox as Sandbox
    from counterpoint.environments.sandbox.python_sandbox import SandboxUnavailable as SandboxUnavailable
    from counterpoint.environments.tools.definition import ToolResult as ToolResult
    from counterpoint.environments.tools.environment import ToolEnvironment as ToolEnvironment
    from counterpoint.environments.tools.play import play_with_tools as play_with_tools
    from counterpoint.environments.workers.load import load_environment as load_environment
    from counterpoint.transport.records import Rollout as Rollout
    from counterpoint.transport.records import Turn as Turn
else:
    __all__, __getattr__, __dir__ = public_names(__name__)
