"""Splits the arguments of a batch over workers, and joins what they return, in order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np


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
