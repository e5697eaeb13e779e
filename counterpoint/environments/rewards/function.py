"""The kind `function`: a reward function of the operator's, by import path."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.import_path import check_allowed, import_advice, import_module
from counterpoint.environments.main_thread import NeedsMainThread, uses_signals, without_signals
from counterpoint.environments.rewards.base import Attempt, Value, as_value
from counterpoint.environments.rewards.config import FunctionConfig
from counterpoint.environments.rewards.processes import BoundedProcesses, OverLimit
from counterpoint.environments.rewards.verifiable import seconds_for

_REMEDY = 'give the part isolation = "process", or switch such limits off'


class FunctionFailed(RuntimeError):
    """A user's function raised what would end a process, or failed in one of its own."""


class FunctionReward:
    """Calls `function(example, completion, state)`: on the loop if it is async, else in a thread or a process."""

    bounds = None
    columns = frozenset[str]()

    def __init__(self, config: FunctionConfig, name: str) -> None:
        """Raises `ValueError` for a path that names no function of three arguments, or one that cannot run in a thread."""
        self._config = config
        self._where = f"part {name!r}: {config.path}"
        self._function = _load(config.path)
        self._is_async = inspect.iscoroutinefunction(self._function)
        self._processes = None
        if config.isolation == "thread" and not self._is_async:
            try:
                uses_signals([self._function], _REMEDY)
            except NeedsMainThread as error:
                raise ValueError(f"{self._where}: {error}") from error
        if config.isolation == "process":
            self._processes = BoundedProcesses(memory_bytes=config.memory_mb * 2**20, keeps_environment=True)

    async def start(self, context: EnvironmentContext) -> None:
        """See `RewardFunction`."""

    async def score(self, attempt: Attempt) -> Value:
        """See `RewardFunction`."""
        if self._processes is not None:
            return as_value(await self._in_process(self._processes, attempt), self._where)
        try:
            if self._is_async:
                returned = await self._function(attempt.example, attempt.completion, attempt.state)
            else:
                with without_signals(_REMEDY):
                    returned = await asyncio.to_thread(
                        self._function, attempt.example, attempt.completion, attempt.state
                    )
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # raised in a task, they end the event loop
            raise FunctionFailed(f"{self._where} raised {type(error).__name__}: {error}") from error
        return as_value(returned, self._where)

    async def close(self) -> None:
        """See `RewardFunction`."""
        if self._processes is not None:
            await self._processes.close()

    async def _in_process(self, processes: BoundedProcesses, attempt: Attempt) -> object:
        arguments: dict[str, Any] = {
            "path": self._config.path,
            "example": asdict(attempt.example),
            "completion": attempt.completion,
            "state": attempt.state,
        }
        cpu_seconds = self._config.cpu_seconds
        try:
            answer = await processes.run("call", arguments, cpu_seconds=cpu_seconds, seconds=seconds_for(cpu_seconds))
        except OverLimit as error:
            raise FunctionFailed(f"{self._where}: {error}") from error
        if "value" not in answer:
            raise FunctionFailed(f"{self._where} raised {answer.get('raised') or answer.get('fault')}")
        return answer["value"]


def _load(path: str) -> Callable[..., Any]:
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"path = {path!r}: expected package.module:function")
    check_allowed(path, "path")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # an operator's module may fail in any way while it is imported
        raise ValueError(
            f"path = {path!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
            f"{import_advice(module_name, error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"path = {path!r}: {module_name} has no function {name!r}")
    try:
        inspect.signature(function).bind(None, "", {})
    except TypeError as error:
        raise ValueError(f"path = {path!r}: it is called with (example, completion, state): {error}") from error
    return function  # type: ignore[no-any-return]
