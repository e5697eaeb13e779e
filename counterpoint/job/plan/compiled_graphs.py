"""The graphs that torch.compile makes of a layer, run on the meta device, so that a dry run keeps what a compiled layer keeps.

Dynamo traces the layer, and inductor's own passes divide its graph: what the forward pass keeps, and what the backward pass
computes again. Inductor would then make kernels; here the operations run one by one. Results that only a kernel sees are not
counted. Counted are those of products and sums, what these take, and what the graph returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch.utils._python_dispatch import _disable_current_modes

_FUSED = (
    "cat",
    "clone",
    "_to_copy",
    "full",
    "scalar_tensor",
    "iota",
    "convert_element_type",
    "where",
    "expand",
    "gather",
)
"""Operations that inductor computes inside a kernel although torch does not call them pointwise."""


def backend(traced: fx.GraphModule, inputs: list[Any], **_: Any) -> Callable[..., Any]:
    """Compiles for torch.compile on meta tensors. They are traced as if on a CPU: of the meta device's no graph would be left."""
    _move(traced, "cpu")
    given = [node.meta.get("example_value") for node in traced.graph.nodes if node.op == "placeholder"]
    as_cpu = [
        _on_cpu(fake) if isinstance(fake, torch.Tensor) and fake.is_meta else own
        for fake, own in zip(given, inputs, strict=True)
    ]
    result: Callable[..., Any] = compile_fx(traced, as_cpu, inner_compile=_runner)
    return result


def _on_cpu(fake: Any) -> torch.Tensor:
    with fake.fake_mode:
        made = torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="cpu")
    return made.requires_grad_(fake.requires_grad)


def _move(graph: fx.GraphModule, device: str) -> None:
    for node in graph.graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = {**node.kwargs, "device": torch.device(device)}
    graph.recompile()


def _runner(graph: fx.GraphModule, _inputs: Any, **_: Any) -> Callable[[list[Any]], Any]:
    """Returns what runs a graph; it empties its list of inputs, each of which goes with its last use."""
    _move(graph, "meta")
    inside = _inside_kernels(graph)

    def run(arguments: list[Any]) -> Any:
        given = list(arguments)
        arguments.clear()
        return _Run(graph, inside).boxed_run(given)

    run._boxed_call = True  # type: ignore[attr-defined]  # as torch asks for it
    return run


class _Run(fx.Interpreter):  # type: ignore[misc]  # torch does not type it
    def __init__(self, graph: fx.GraphModule, inside: set[fx.Node]) -> None:
        super().__init__(graph)
        self._inside = inside

    def run_node(self, n: fx.Node) -> Any:
        if n not in self._inside:
            return super().run_node(n)
        with _disable_current_modes():  # of which one counts
            return super().run_node(n)


def _inside_kernels(graph: fx.GraphModule) -> set[fx.Node]:
    """Returns the operations whose results only a kernel sees."""
    inside: set[fx.Node] = set()
    fused = {node for node in graph.graph.nodes if _is_fused(node)}
    for node in reversed(graph.graph.nodes):
        is_inner = all(each in inside if _is_view(each) else each in fused or _is_sum(each) for each in node.users)
        if is_inner and (node in fused or _is_view(node)):
            inside.add(node)
    return inside


def _is_fused(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target.overloadpacket.__name__ in _FUSED


def _is_sum(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.reduction in target.tags


def _is_view(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.is_view
