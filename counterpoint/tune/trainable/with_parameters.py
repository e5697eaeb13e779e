"""Binds objects to a trainable that no configuration can hold, such as a data set."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from counterpoint.tune.errors import TuneError
from counterpoint.tune.trainable.trainable import Trainable


def with_parameters(trainable: Callable[..., Any], **parameters: Any) -> Callable[..., Any]:
    """Returns the trainable with more arguments: a function is called with them, and so is `setup` of a class.

    They are not journalled: trials have them by a fork of the tuner, as it is with lambdas. Raises `TuneError` for what can take
    no such arguments.
    """
    kind = trainable if inspect.isclass(trainable) else None
    if not callable(trainable) or (kind is not None and not issubclass(kind, Trainable)):
        raise TuneError(f"with_parameters was given {trainable!r}; expected a function or a Trainable class")
    name = getattr(trainable, "__name__", type(trainable).__name__)
    setup: Callable[..., Any] = trainable if kind is None else kind.setup
    try:
        inspect.signature(setup).bind_partial(**parameters)
    except TypeError as error:
        raise TuneError(f"{name} cannot take {', '.join(parameters)}: {error}") from None
    if kind is None:
        bound: Any = functools.partial(trainable, **parameters)
        bound.__name__ = name
        return bound  # type: ignore[no-any-return]
    return type(
        name, (kind,), {"setup": functools.partialmethod(setup, **parameters), "__qualname__": f"<locals>.{name}"}
    )
