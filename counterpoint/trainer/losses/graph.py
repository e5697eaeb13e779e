"""Computes a traced loss, step by step, for each sample on its own, on the CPU.

`counterpoint/run/loss_graph.py` has checked what the graph may have. Here each operation is a function of a table. What an
operation would make is known before it is made, from shapes alone, so a loss takes no more memory or time than `MAX_ELEMENTS`
allow. On the CPU an index out of range raises; on an accelerator it would end the process, and with it all runs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from counterpoint.run.loss_graph import LARGEST, OPERATIONS, GraphNode, LossGraph, read_graph
from counterpoint.trainer.losses.contract import Loss, LossInputs, LossOutputs

MAX_ELEMENTS = 2**26
"""Elements that all steps of a loss may read and make together, in one row."""

PIECE = 64
"""What a value costs beside its elements, as a number of elements: a tensor of one takes as much memory and time as this many."""


def load_graph(data: bytes) -> Loss:
    """Returns the loss that a graph computes: the sum of those of the samples. Raises `ValueError` for a graph that is refused.

    The loss of a sample, and its metrics, are at its first token. The metrics have the names of the graph.
    """
    graph = read_graph(data)
    return Loss(lambda inputs: _computed(graph, inputs), tuple(sorted(graph.result[1])))


def _computed(graph: LossGraph, inputs: LossInputs) -> LossOutputs:
    new_P, room = inputs.trainer_log_probabilities_P, [MAX_ELEMENTS]
    columns = {name: column_P.cpu() for name, column_P in inputs.given.items()} | {"logprobs": new_P.cpu()}
    counts = torch.bincount(inputs.sample_P.cpu(), minlength=inputs.samples).tolist()
    losses, metrics = [], []
    firsts = [0, *accumulate(counts[:-1])]
    for first, count in zip(firsts, counts, strict=True):
        given = {}
        for each in graph.inputs:
            own = columns[each.name][first : first + count]
            given[each.name] = own[0] if each.rank == 0 else own[:, None] if each.rank > own.ndim else own
        loss, own_metrics = run_graph(graph, given, room)
        losses.append(loss.double())
        metrics.append(own_metrics)

    def at_the_first(values: list[Tensor]) -> Tensor:
        return torch.zeros(len(new_P), dtype=torch.float64).index_add(0, torch.tensor(firsts), torch.stack(values))

    loss_P = at_the_first(losses).to(new_P.dtype)
    if new_P.ndim > 1:
        loss_P = torch.cat([loss_P[:, None], torch.zeros(len(new_P), new_P.shape[1] - 1, dtype=new_P.dtype)], 1)
    found = {name: at_the_first([each[name] for each in metrics]).to(new_P.device) for name in graph.result[1]}
    return LossOutputs(loss_P.to(new_P.device), torch.zeros_like(new_P, dtype=torch.bool), found)


def run_graph(graph: LossGraph, given: dict[str, Tensor], room: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss of one sample, a scalar, and its metrics in float64, without gradient.

    Args:
        graph: of a loss.
        given: its inputs by name, on the CPU.
        room: how many elements may be read and made; less by those of the sample afterwards.

    Raises `ValueError`, or what torch raises for arguments that do not fit.
    """
    known: dict[str, Any] = {
        node.name: given[each.name] for node, each in zip(graph.graph.nodes, graph.inputs, strict=False)
    }
    for node in graph.steps:
        try:
            known[node.name] = _step(node, known, room)
        except Exception as error:
            raise ValueError(f"step {node.name[:80]!r} of the loss, {node.operation}: {error}") from error
    loss, metrics = graph.result
    result = known[loss["ref"]]
    if not (isinstance(result, Tensor) and result.ndim == 0 and result.is_floating_point()):
        raise ValueError(f"the loss of a sample is {_described(result)}; expected a scalar of floats")
    found = {}
    for name, each in metrics.items():
        value = known[each["ref"]]
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(f"metric {name!r} is {_described(value)}; expected one number")
        found[name] = value.detach().double().reshape(())
    return result, found


def _step(node: GraphNode, known: dict[str, Any], room: list[int]) -> Any:
    args = [_decoded(each, known) for each in node.args]
    kwargs = {name: _decoded(each, known) for name, each in node.kwargs.items()}
    table = _METHODS if node.op == "call_method" else _FUNCTIONS
    if (function := table.get(node.operation)) is None:
        raise ValueError(f"{node.target!r} is no such operation")
    tensors = []
    for value in _values([*args, *kwargs.values()]):
        _take(PIECE + _size(value), room)
        tensors += [value] if isinstance(value, Tensor) else []
    if not tensors and node.operation not in _OF_NUMBERS:
        raise ValueError("none of its arguments is a tensor")
    _take(_elements(node.operation, function, args, kwargs, tensors), room)
    found = function(*args, **kwargs)
    if isinstance(found, int) and abs(found) > LARGEST:
        raise ValueError("the number is too large")
    return found


def _take(size: int, room: list[int]) -> None:
    if size > room[0]:
        raise ValueError(f"the loss would take more than {MAX_ELEMENTS} elements of memory and work")
    room[0] -= size


def _size(value: Any) -> int:
    """Returns the elements of a tensor, 1 for anything else. A length of 0 counts as 1: the sum along it has all the others."""
    return math.prod(max(1, length) for length in value.shape) if isinstance(value, Tensor) else 1


def _elements(
    name: str, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], tensors: list[Tensor]
) -> int:
    """Returns how many elements the result has at most; computes nothing."""
    most = sum(map(_size, tensors))
    if name in _DIVIDING:
        if not all(each.numel() for each in tensors):
            raise ValueError("an empty tensor cannot be divided")
        longest: int = max(length for each in tensors for length in (1, *each.shape))
        return most + PIECE * longest
    if name == "where" and len(args) + len(kwargs) < 3:
        raise ValueError("it takes a condition and two values")
    if name == "getitem" and isinstance(args[0], Tensor) and _masks(args[1:]):
        if not isinstance(args[1], Tensor):
            raise ValueError("a mask is the only index")
        return most
    shapes = {each.shape for each in tensors if each.numel() != 1}
    if name in _NOT_LARGER or (len(shapes) < 2 and name not in _LARGER):
        return most
    found = function(*_on_meta(args), **dict(zip(kwargs, _on_meta(kwargs.values()), strict=True)))
    return sum(map(_size, _tensors([found])))


def _on_meta(values: Any) -> list[Any]:
    return [
        value.detach().to("meta")
        if isinstance(value, Tensor)
        else type(value)(_on_meta(value))
        if type(value) in (list, tuple)
        else value
        for value in values
    ]


def _masks(values: Sequence[Any]) -> bool:
    return any(each.dtype == torch.bool for each in _tensors(values))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    return (value for value in _values(values) if isinstance(value, Tensor))


def _values(values: Sequence[Any]) -> Iterator[Any]:
    """Yields values, and what lists and tuples among them have, at any depth."""
    for value in values:
        yield value
        if isinstance(value, list | tuple):
            yield from _values(value)


def _decoded(value: Any, known: dict[str, Any]) -> Any:
    """Returns an argument from its encoded form, which `check_graph` has passed."""
    if isinstance(value, list):
        return [_decoded(each, known) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "ref":
            return known[content]
        case "tuple":
            return tuple(_decoded(each, known) for each in content)
        case "slice":
            parts = [_decoded(each, known) for each in content]
            if any(isinstance(each, Tensor) for each in parts):
                raise ValueError("a slice of tensors")
            return slice(*parts)
        case "ellipsis":
            return ...
        case "float":
            return float(content)
        case "dtype":
            return getattr(torch, content)
    raise ValueError(f"{kind!r} is no argument")


def _described(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _of_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operator of Python for tensors and numbers alone: of texts and lists it could take any memory."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        if not all(isinstance(each, Tensor | bool | int | float) for each in args):
            raise ValueError("its arguments are not tensors and numbers")
        return function(*args, **kwargs)

    return checked


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, Tensor) or isinstance(exponent, Tensor):
        return torch.pow(base, exponent)
    found = math.pow(base, exponent)
    whole = isinstance(base, int) and isinstance(exponent, int) and exponent >= 0
    return int(found) if whole and abs(found) <= LARGEST else found


def _item(value: Any, index: Any) -> Any:
    if not isinstance(value, Tensor | tuple | list):
        raise ValueError(f"{_described(value)} has no parts")
    return value[index]


def _cast(tensor: Tensor, dtype: Any) -> Tensor:
    if not isinstance(dtype, torch.dtype | Tensor):
        raise ValueError("it takes a dtype")
    return tensor.to(dtype.dtype if isinstance(dtype, Tensor) else dtype)


def _method(name: str) -> Callable[..., Any]:
    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{_described(tensor)} has no {name}")
        return getattr(tensor, name)(*args, **kwargs)

    return call


def _either(name: str) -> Callable[..., Any]:
    """Returns an operation of tensors, as torch has it, and of numbers, as Python has it."""
    of_tensors, of_numbers = getattr(torch, name), getattr(operator, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (of_tensors if any(isinstance(each, Tensor) for each in args) else of_numbers)(*args, **kwargs)

    return call


_OF_PYTHON = ("truediv", "floordiv", "mod", "and_", "or_", "xor", "invert", "neg")
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{name: _of_numbers(getattr(operator, name)) for name in _OF_PYTHON},
    **{name: _of_numbers(_either(name)) for name in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge")},
    "pow": _of_numbers(_power),
}
_OF_NUMBERS = {*_ARITHMETIC, "getitem", "getattr"}

_DIVIDING = {"split", "chunk", "unbind"}
_NOT_LARGER = {"getattr", "size", "dim", "numel", "view", "reshape"}
_LARGER = {"expand", "expand_as", "getitem", "stack", "cat", "concat", "gather", "index_select", "take_along_dim"}

_METHODS = {name: _method(name) for name in OPERATIONS if hasattr(Tensor, name)} | {"to": _cast}
"""What computes each method of a tensor."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in OPERATIONS if callable(getattr(torch, name, None))},
    **_ARITHMETIC,
    "getattr": getattr,
    "getitem": _item,
    "softplus": functional.softplus,
    "log_sigmoid": functional.logsigmoid,
    "logsigmoid": functional.logsigmoid,
}
"""What computes each function."""
