"""A loss that a client has traced, as plain data: what a graph may have, checked without torch.

A graph is hostile input. It has a number of nodes in order, each an operation of a list on earlier nodes and constants; there are
no loops, no names that are looked up anywhere, and nothing that is executed but what `counterpoint/trainer/losses/graph.py` has
for an operation. The form is that of the SDK tinker 0.38 (`tinker/types/custom_loss_graph.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from counterpoint.transport.typed import met

MAX_GRAPH_BYTES = 2**18
MAX_NODES = 512
MAX_INPUTS = 16
MAX_PARTS = 256
"""Constants and nodes in the arguments of one node."""
MAX_DEPTH = 6
LARGEST = 2**53
"""Largest whole number of a graph in size: a float64 has all up to it."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ELEMENTWISE = _names(
    "abs neg exp expm1 log log1p log2 sqrt rsqrt square sin cos tanh sigmoid erf sign reciprocal floor ceil round relu softplus "
    "log_sigmoid logsigmoid isnan isinf isfinite logical_not clamp clip clamp_min clamp_max nan_to_num "
    "zeros_like ones_like full_like clone detach contiguous float double long int bool to "
    "add sub mul div true_divide truediv floordiv floor_divide mod remainder pow maximum minimum "
    "eq ne lt le gt ge logical_and logical_or logical_xor and_ or_ xor invert where masked_fill lerp"
)
REDUCING = _names(
    "sum mean prod amax amin max min std var all any argmax argmin logsumexp softmax log_softmax cumsum cumprod logcumsumexp "
    "count_nonzero flip nansum nanmean"
)
SHAPING = _names(
    "view reshape flatten unsqueeze squeeze transpose permute t expand expand_as view_as getitem select narrow gather "
    "index_select take_along_dim stack cat concat chunk split unbind size dim numel"
)
OPERATIONS = ELEMENTWISE | REDUCING | SHAPING | {"getattr"}
ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "values", "indices", "T"})
"""What `getattr` may ask of a tensor, or of what `max` returns."""

KEYWORDS = _names(
    "dim keepdim dtype min max unbiased correction rounding_mode beta threshold other alpha index input tensors value exponent "
    "start length dim0 dim1 dims start_dim end_dim axis fill_value mask condition end weight nan posinf neginf chunks size "
    "shape split_size"
)
DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")

_MODULES = ("", "torch.", "torch.nn.functional.", "torch._C._nn.", "torch.special.", "torch.functional.", "operator.")
_METRIC = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_INPUT = re.compile(r"[a-z_][a-z0-9_]{0,63}")


class LossInput(msgspec.Struct, frozen=True):
    """One input of a loss: the log-probabilities, or what each datum has under this name."""

    name: str
    rank: Literal[0, 1, 2]


class GraphNode(msgspec.Struct, frozen=True):
    """One step; `args` and `kwargs` are as the SDK encodes them."""

    op: str
    name: str
    target: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}

    @property
    def operation(self) -> str:
        """The name of the operation alone."""
        return self.target.rpartition(".")[2]


class _Nodes(msgspec.Struct, frozen=True):
    nodes: list[GraphNode]
    format: Literal[1] = 1


class LossGraph(msgspec.Struct, frozen=True):
    """A graph that `read_graph` has checked, or that is to be written."""

    inputs: list[LossInput]
    graph: _Nodes

    @property
    def steps(self) -> list[GraphNode]:
        """The nodes that compute something, in order."""
        return self.graph.nodes[len(self.inputs) : -1]

    @property
    def result(self) -> tuple[Any, dict[str, Any]]:
        """The references to the loss and to its metrics by name."""
        ((loss, metrics),) = (each["tuple"] if isinstance(each, dict) else each for each in self.graph.nodes[-1].args)
        return loss, metrics["dict"]


def read_graph(data: bytes) -> LossGraph:
    """Reads a graph as JSON; one that is not as a graph must be raises `ValueError`."""
    if len(data) > MAX_GRAPH_BYTES:
        raise ValueError(f"the loss's graph has {len(data)} bytes; at most {MAX_GRAPH_BYTES}")
    try:
        found = msgspec.json.decode(data, type=met(LossGraph))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"the loss's graph cannot be read: {error}") from error
    check_graph(found)
    return found


def check_graph(given: LossGraph) -> None:
    """Raises `ValueError`, which says what a loss cannot have, and where."""
    names, nodes = [each.name for each in given.inputs], given.graph.nodes
    if not 1 <= len(names) <= MAX_INPUTS or len(set(names)) < len(names) or not all(map(_INPUT.fullmatch, names)):
        raise ValueError(
            f"the loss has the inputs {', '.join(names)[:200]!r}; expected 1 to {MAX_INPUTS} different names"
        )
    if names[0] != "logprobs" or not given.inputs[0].rank:
        raise ValueError("the loss's first input is logprobs, of rank 1 or 2")
    if len(nodes) > MAX_NODES:
        raise ValueError(f"the loss has {len(nodes)} steps; at most {MAX_NODES}")
    if [(each.op, each.target) for each in nodes[: len(names)]] != [("placeholder", name) for name in names]:
        raise ValueError("the loss's first steps are not its inputs")
    if [each.op for each in nodes].count("output") != 1 or nodes[-1].op != "output":
        raise ValueError("the loss's last step, and no other, is its output")
    known = {each.name for each in nodes[: len(names)]}
    if len({each.name for each in nodes}) < len(nodes):
        raise ValueError("two steps of the loss have one name")
    for node in nodes[len(names) :]:
        where = f"step {node.name[:80]!r} of the loss"
        if node.op != "output":
            _check_operation(node, where)
        parts = list(_parts([*node.args, *node.kwargs.values()], where))
        if len(parts) > MAX_PARTS:
            raise ValueError(f"{where} has {len(parts)} arguments; at most {MAX_PARTS}")
        if unknown := [each["ref"] for each in parts if isinstance(each, dict) and each["ref"] not in known]:
            raise ValueError(f"{where} refers to {unknown[0]!r:.80}, which is no earlier step")
        known.add(node.name)
    _check_result(nodes[-1])


def _check_operation(node: GraphNode, where: str) -> None:
    if node.op not in ("call_function", "call_method"):
        raise ValueError(f"{where}: {node.op[:80]!r} is not served; expected functions and methods")
    prefix = node.target.removesuffix(node.operation)
    if node.operation not in OPERATIONS or prefix not in _MODULES or (node.op == "call_method" and prefix):
        raise ValueError(f"{where}: {node.target[:80]!r} is none of the operations that a loss may have")
    if unknown := sorted(set(node.kwargs) - KEYWORDS):
        raise ValueError(f"{where}: {node.operation} takes no {unknown[0][:80]!r}")
    if node.operation == "getattr" and (node.op, len(node.args), bool(node.kwargs)) != ("call_function", 2, False):
        raise ValueError(f"{where}: getattr takes a tensor and a name")
    if node.operation == "getattr" and not (isinstance(node.args[1], str) and node.args[1] in ATTRIBUTES):
        raise ValueError(f"{where}: a loss may not read {node.args[1]!r:.80} of a tensor")


def _parts(values: Any, where: str, depth: int = 0) -> Iterator[Any]:
    """Yields the constants and references of encoded arguments. Raises `ValueError` for what is none."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{where}: its arguments are nested more than {MAX_DEPTH} deep")
    for value in values:
        if isinstance(value, list):
            yield from _parts(value, where, depth + 1)
        elif isinstance(value, dict):
            ((kind, content),) = value.items() if len(value) == 1 else [("", None)]
            if kind == "ref" and isinstance(content, str):
                yield value
            elif kind in ("tuple", "slice") and isinstance(content, list) and (kind == "tuple" or len(content) == 3):
                yield from _parts(content, where, depth + 1)
            elif kind == "dict" and isinstance(content, dict):
                yield from _parts(content.values(), where, depth + 1)
            elif not _is_constant(kind, content):
                raise ValueError(f"{where}: {value!r:.80} is no argument")
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"{where}: {str(value)[:40]} is too large")
        elif isinstance(value, str) and len(value) > 64:
            raise ValueError(f"{where}: a text of {len(value)} characters")
        else:
            yield value


def _is_constant(kind: str, content: Any) -> bool:
    known = {"ellipsis": (True,), "float": ("inf", "-inf", "nan"), "dtype": DTYPES}
    return any(type(each) is type(content) and each == content for each in known.get(kind, ()))


def _check_result(output: GraphNode) -> None:
    (result,) = output.args if len(output.args) == 1 else [None]
    pair = result.get("tuple") if isinstance(result, dict) else result
    if not (isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], dict) and "ref" in pair[0]):
        raise ValueError("the loss's output is not a pair of a loss and its metrics")
    metrics = pair[1].get("dict") if isinstance(pair[1], dict) else None
    if not isinstance(metrics, dict):
        raise ValueError("the loss's output has no metrics by name")
    for name, value in metrics.items():
        if not (_METRIC.fullmatch(name) and isinstance(value, dict) and "ref" in value):
            raise ValueError(
                f"the loss's metric {name[:80]!r}: expected a step under custom/NAME:sum or custom/NAME:mean"
            )
