"""The workers of a role as one object to call: what users of calls see. `caller.py` does the work."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np

from counterpoint.cluster.calls.call import Call, Calls
from counterpoint.cluster.calls.caller import Caller
from counterpoint.cluster.calls.codec import encode_parts
from counterpoint.cluster.member import Member, Stage

DEFAULT_TIMEOUT_SECONDS = 300.0
"""The deadline of a call that states none. Death and silence of the callee end it much earlier."""


class RoleGroup:
    """The workers of a role, to be called. `context.group(role)` makes one; it may be used from any thread.

    Each call returns at once with a `Call`: `await group.call("step", x)` in async code, `group.call("step", x).result()` in
    a thread. Only methods marked `@remote` can be called. Arguments are encoded before it returns: one that cannot travel is
    a `TypeError` here, with its path. Arrays are sent by reference, so they must not be written to until the call has ended.

    A call ends in one of these ways, the errors all `errors.CallError`s:

    - the method's result;
    - `RemoteError`: the method raised, or there is no such method;
    - `ActorDied`: the callee died or fell silent while the call was in flight, and nobody knows whether the method ran; or it
      has finished or failed for good, or has left the job;
    - `ActorRestarting`: the callee is being started (again) or cannot be reached; the method was not sent;
    - `CallTimeout`: no answer within `timeout` seconds. The method may still run.
    - `ActorBusy`: the callee runs a plain method beyond its call's deadline, and no other until that ends. This one was not run.
    - `NoSuchActor`: the job has no worker of that role and rank.

    Death is noticed at once, silence within two heartbeats. A method marked `@remote(idempotent=True)` is different: its calls
    are sent again, to the next incarnation or to another worker of the role, until the deadline, and end with `ActorDied` only
    when there is nobody left. No other method is sent twice, but for one that a busy worker has not run: it goes to the next.
    """

    def __init__(self, role: str, caller: Caller) -> None:
        self.role, self._caller = role, caller
        caller.follow(role)

    def __repr__(self) -> str:
        return f"RoleGroup({self.role!r}, {len(self)} workers)"

    def __len__(self) -> int:
        """How many workers of the role have not finished, as last known here."""
        return len(self.members())

    def members(self) -> Sequence[Member]:
        """Returns the workers of the role that have not finished, as last known here, by rank."""
        return [member for member in self._caller.members(self.role) if member.address or member.stage != Stage.FINISH]

    def call(
        self,
        method: str,
        /,
        *args: Any,
        rank: int | None = None,
        timeout: float = DEFAULT_TIMEOUT_SECONDS,
        **kwargs: Any,
    ) -> Call[Any]:
        """Calls a method of the worker of that rank; without one, of the workers that take calls in turn."""
        worker = "" if rank is None else f"{self.role}-{rank}"
        return self._send(worker, rank is not None, method, args, kwargs, timeout)

    def call_rank0(
        self, method: str, /, *args: Any, timeout: float = DEFAULT_TIMEOUT_SECONDS, **kwargs: Any
    ) -> Call[Any]:
        """Calls a method of the worker of rank 0."""
        return self._send(f"{self.role}-0", True, method, args, kwargs, timeout)

    def call_all(
        self, method: str, /, *args: Any, timeout: float = DEFAULT_TIMEOUT_SECONDS, **kwargs: Any
    ) -> Calls[list[Any]]:
        """Calls a method of every worker with the same arguments; its result is the list of theirs, by rank.

        It fails with the first error, as soon as there is one; `Calls.each` has every worker's.
        """
        frames = encode_parts({"args": [*args], "kwargs": kwargs})
        send = partial(self._caller.send, self.role, fixed=True, method=method, frames=frames, timeout=timeout)
        workers = [member.worker for member in self.members()] or [""]  # nobody: the call says so
        return Calls([send(worker=worker) for worker in workers], list)

    def call_batch(
        self, method: str, /, *args: Any, timeout: float = DEFAULT_TIMEOUT_SECONDS, **kwargs: Any
    ) -> Calls[Any]:
        """Splits the arguments over the workers that take calls; its result is theirs joined, in the order of the arguments.

        Each positional argument is a list, a tuple or an array, all of one length; each worker gets consecutive items of
        each. Keyword arguments go to every worker as they are. The method returns one item for each that it got, as a list
        or an array, or as a dict or a tuple of such. Raises `ValueError` when the arguments cannot be split, and its result
        when the answers cannot be joined.
        """
        callable_members = [member for member in self.members() if member.address] or self.members()
        parts = split(args, max(1, len(callable_members)))
        if not parts:
            raise ValueError("call_batch: the arguments are empty")
        lengths = [length for _, length in parts]
        calls = [
            self._send(callable_members[index].worker if callable_members else "", False, method, part, kwargs, timeout)
            for index, (part, _) in enumerate(parts)
        ]
        return Calls(calls, lambda results: join(results, lengths))

    def wait_until_callable(self, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Blocks until every worker of the role takes calls, such as after an `ActorDied`.

        Raises `CallTimeout`, naming the workers that do not.
        """
        self._caller.wait_until_callable(self.role, timeout)

    def _send(
        self, worker: str, fixed: bool, method: str, args: Sequence[Any], kwargs: dict[str, Any], timeout: float
    ) -> Call[Any]:
        frames = encode_parts({"args": [*args], "kwargs": kwargs})
        return self._caller.send(self.role, worker, fixed, method, frames, timeout)


def split(args: Sequence[Any], parts: int) -> list[tuple[list[Any], int]]:
    """Returns for each of at most `parts` workers its part of every argument, and the length of its part.

    The parts are consecutive, and their lengths differ by one at most. Raises `ValueError` unless all arguments are lists,
    tuples or arrays of one length.
    """
    for index, argument in enumerate(args):
        if not isinstance(argument, tuple) and not _is_list(argument):
            kind = type(argument).__name__
            raise ValueError(f"call_batch: args[{index}] is a {kind}; expected a list, a tuple or an array")
    lengths = [len(argument) for argument in args]
    if not lengths or len({*lengths}) != 1:
        raise ValueError(f"call_batch: the arguments have lengths {lengths}; expected at least one, all of one length")
    size, parts = lengths[0], min(parts, lengths[0])
    bounds = [size * part // parts for part in range(parts + 1)] if parts else []
    return [([argument[begin:end] for argument in args], end - begin) for begin, end in pairwise(bounds)]


def join(results: Sequence[Any], lengths: Sequence[int], path: str = "result") -> Any:
    """Returns the results of all parts as one: lists and arrays one after the other, dicts and tuples by their items.

    Raises `ValueError` when a list or an array has not the length of its part, or the results differ in kind.
    """
    first = results[0]
    if any(type(result) is not type(first) for result in results):
        kinds = sorted({type(result).__name__ for result in results})
        raise ValueError(f"call_batch: {path} is of different types: {', '.join(kinds)}")
    if isinstance(first, dict):
        if any([*result] != [*first] for result in results):
            raise ValueError(f"call_batch: {path} has different keys from different workers")
        return {key: join([result[key] for result in results], lengths, f"{path}[{key!r}]") for key in first}
    if isinstance(first, tuple):
        if any(len(result) != len(first) for result in results):
            raise ValueError(f"call_batch: {path} is a tuple of different lengths from different workers")
        return tuple(join(items, lengths, f"{path}[{i}]") for i, items in enumerate(zip(*results, strict=True)))
    if first is None:
        return None
    if not _is_list(first):
        kind = type(first).__name__
        raise ValueError(f"call_batch: {path} is a {kind}; expected a list or an array, or a dict or tuple of such")
    found = [len(result) for result in results]
    if found != [*lengths]:
        raise ValueError(
            f"call_batch: {path} has lengths {found} for parts of {[*lengths]}: one item for each is expected"
        )
    return np.concatenate(results) if isinstance(first, np.ndarray) else [*chain.from_iterable(results)]


def _is_list(value: object) -> bool:
    return isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim > 0)
