"""What a task is: examples, rollouts over turns, and scores. Built-in tasks, and the protocol for others."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from environments.base import Environment as Environment
    from environments.base import EnvironmentContext as EnvironmentContext
    from environments.base import Example as Example
    from environments.base import Model as Model
    from environments.base import Reply as Reply
    from environments.base import ToolCall as ToolCall
    from transport.records import Rollout as Rollout
    from transport.records import Turn as Turn

_EXPORTS = {
    "Environment": "environments.base",
    "Example": "environments.base",
    "EnvironmentContext": "environments.base",
    "Model": "environments.base",
    "Reply": "environments.base",
    "ToolCall": "environments.base",
    "Rollout": "transport.records",
    "Turn": "transport.records",
}
"""The module that defines each name. It is imported at the first use, since reading a configuration needs none of them."""


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
