"""Marks the methods of a worker that other workers may call, and lists those of a class. Nothing else can be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

Function = TypeVar("Function", bound=Callable[..., Any])

_MARK = "__remote__"


@dataclass(frozen=True, slots=True)
class Method:
    """A method that other workers may call."""

    name: str
    idempotent: bool
    """Whether a call may run twice, and is therefore repeated when its callee died or was out of reach."""
    is_async: bool
    """Whether it is `async def`: it then runs on an event loop, beside other calls."""


@overload
def remote(function: Function, /) -> Function: ...


@overload
def remote(*, idempotent: bool = False) -> Callable[[Function], Function]: ...


def remote(
    function: Function | None = None, /, *, idempotent: bool = False
) -> Function | Callable[[Function], Function]:
    """Marks a method of a worker as one that other workers may call: `@remote` or `@remote(idempotent=True)`.

    A plain method runs in the thread of the worker's calls, one call at a time and in the order of arrival, beside `start`,
    which has a thread of its own: what both use needs a lock. An `async def` runs on an event loop beside other calls. It may
    take and return None, numbers, strings, bytes, numpy arrays, and lists, tuples and dicts of these. Arrays of a result are
    copied when it returns, so the worker may go on to write to them. When the method raises, the caller gets a `RemoteError`
    and the worker goes on. One that runs beyond the deadline of its call cannot be ended: until it returns, other plain methods
    are refused with `ActorBusy`, which names it.

    `idempotent` says that running twice does no harm. Only then is a call sent again when its callee died, or its connection
    broke, before it answered; the caller then sees nothing of it but the time. A method that a subclass overrides stays marked.
    """

    def mark(marked: Function) -> Function:
        setattr(marked, _MARK, idempotent)
        return marked

    return mark if function is None else mark(function)


def methods_of(worker: type) -> Mapping[str, Method]:
    """Returns the methods of a class that may be called, by name. The newest mark among its bases counts."""
    found: dict[str, Method] = {}
    for name in dir(worker):
        marks = [vars(base)[name] for base in worker.__mro__ if hasattr(vars(base).get(name), _MARK)]
        if marks:
            function = inspect.getattr_static(worker, name)
            found[name] = Method(name, bool(getattr(marks[0], _MARK)), inspect.iscoroutinefunction(function))
    return found
