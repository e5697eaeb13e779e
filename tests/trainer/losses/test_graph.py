"""A traced loss has the value, gradient and metrics of the client's own function; a hostile graph is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from counterpoint.run.loss_graph import MAX_NODES, read_graph
from counterpoint.trainer.losses.contract import LossInputs
from counterpoint.trainer.losses.graph import load_graph, run_graph
from tests.trainer.losses.traced import traced

Loss = Callable[..., tuple[Tensor, dict[str, Tensor]]]


def clipped(logprobs: Tensor, old: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = torch.exp(logprobs - old)
    objective = torch.minimum(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    return -objective.sum(), {"custom/ratio:mean": ratio.mean(), "custom/places:sum": (advantages != 0).sum()}


def sequence(logprobs: Tensor, old: Tensor, scale: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mean = (logprobs - old).mean(dim=-1, keepdim=True).squeeze()
    loss = -functional.logsigmoid(scale * mean) + functional.softplus(logprobs[1:]).sum() / logprobs.shape[0]
    return loss + logprobs.max(dim=0).values - logprobs[-1] ** 2, {"custom/mean:mean": mean}


def masked(logprobs: Tensor, mask: Tensor, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    chosen, count = logprobs[mask > 0], (mask > 0).sum().clamp(min=1)
    loss = torch.where(ids % 2 == 0, logprobs, -logprobs.detach()).sum() / count + chosen.square().mean()
    return loss + logprobs.float().to(torch.float64).cumsum(0).logsumexp(0), {}


def several(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    chosen = torch.gather(logprobs, 1, weights.argmax(dim=1, keepdim=True)).squeeze(1)
    pairs = torch.stack([chosen, (logprobs * weights).sum(-1)]) - torch.softmax(logprobs, dim=-1).sum(-1).unsqueeze(0)
    return -(pairs**2).sum(), {"custom/a/b:sum": pairs.detach().sum()}


CASES: list[tuple[Loss, dict[str, Any], dict[str, Any]]] = [
    (clipped, {"logprobs": 1, "old": 1, "advantages": 1}, {}),
    (sequence, {"logprobs": 1, "old": 1, "scale": 0}, {}),
    (masked, {"logprobs": 1, "mask": 1, "ids": 1}, {"ids": torch.int64}),
    (several, {"logprobs": 2, "weights": 2}, {}),
]


@pytest.mark.parametrize(("function", "ranks", "dtypes"), CASES)
def test_value_gradient_and_metrics_are_those_of_the_function(
    function: Loss, ranks: dict[str, Any], dtypes: dict[str, Any]
) -> None:
    generator, lengths = torch.Generator().manual_seed(5), (4, 2, 3)
    columns: dict[str, Tensor] = {}
    for name, rank in ranks.items():
        drawn = torch.randn((sum(lengths), 3) if rank == 2 else sum(lengths), generator=generator)
        columns[name] = (drawn * 9).to(torch.int64) if name in dtypes else drawn
        if rank == 0:
            columns[name] = columns[name][:1].expand(sum(lengths)).clone()
    new = columns.pop("logprobs").requires_grad_()
    own = new.detach().clone().requires_grad_()
    expected = torch.zeros(()).double()
    metrics: dict[str, Tensor] = {}
    for each in zip(own.split(lengths), *(column.split(lengths) for column in columns.values()), strict=True):
        arguments = [part[0] if ranks[name] == 0 else part for part, name in zip(each, ranks, strict=True)]
        loss, measured = function(*arguments)
        expected = expected + loss
        metrics = {name: metrics.get(name, torch.zeros(())) + value.double() for name, value in measured.items()}
    loss_of_row = load_graph(traced(function, ranks))
    inputs = LossInputs(
        new, new.detach()[:, 0] if new.ndim > 1 else new.detach(), torch.zeros(sum(lengths)),
        sample_P=torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)), samples=3,
        entropies_P=torch.zeros(sum(lengths)), given=columns,
    )  # fmt: skip
    outputs, gradients = loss_of_row(inputs)
    assert loss_of_row.metrics == tuple(sorted(metrics))
    assert float(outputs.loss_P.detach().double().sum()) == pytest.approx(float(expected.detach()), abs=1e-6)
    assert torch.equal(gradients.log_probabilities_P, torch.autograd.grad(expected, own)[0])
    assert gradients.log_probabilities_P.count_nonzero() > 3
    for name, value in metrics.items():
        assert float(outputs.metrics_P[name].sum()) == pytest.approx(float(value.detach()))


PLAIN = msgspec.json.decode(traced(clipped, {"logprobs": 1, "old": 1, "advantages": 1}))


def changed(**changes: Any) -> bytes:
    """The graph of `clipped` with one node changed."""
    graph = copy.deepcopy(PLAIN)
    graph["graph"]["nodes"][changes.pop("at", 3)] |= changes
    return msgspec.json.encode(graph)


def with_nodes(*nodes: dict[str, Any], result: str) -> bytes:
    """A graph of `logprobs` alone, with these steps."""
    first = {"op": "placeholder", "name": "logprobs", "target": "logprobs"}
    last = {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": result}, {"dict": {}}]}]}
    graph = {"inputs": [{"name": "logprobs", "rank": 1}], "graph": {"format": 1, "nodes": [first, *nodes, last]}}
    return msgspec.json.encode(graph)


def step(name: str, target: str, *args: Any, op: str = "call_function", **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


X = {"ref": "logprobs"}

REFUSED = [
    b"",
    b"{}",
    b"[" * 100_000,
    changed(op="call_module"),
    changed(op="get_attr"),
    changed(op="placeholder"),
    changed(target="os.system"),
    changed(target="builtins.eval"),
    changed(target="torch.load"),
    changed(target="torch.ops.aten.exp"),
    changed(target="getattr", args=[X, "__class__"]),
    changed(target="getattr", args=[X, {"ref": "old"}]),
    changed(op="call_method", target="backward"),
    changed(op="call_method", target="numpy"),
    changed(op="call_method", target="__reduce__"),
    changed(op="call_method", target="exp_"),
    changed(args=[{"ref": "sub"}, X]),  # itself: a loop
    changed(args=[{"ref": "exp"}, X]),  # a later one
    changed(args=[{"ref": "nothing"}, X]),
    changed(args=[X, 2**60]),
    changed(args=[X, "a" * 65]),
    changed(args=[X, {"device": "cuda"}]),
    changed(args=[X, {"dtype": "object"}]),
    changed(args=[X, {"ref": "old", "other": 1}]),
    changed(args=[[[[[[[[[X]]]]]]]], X]),
    changed(args=[X] * 300),
    changed(kwargs={"out": X}),
    changed(kwargs={"generator": None}),
    changed(at=-1, args=[X]),
    changed(at=-1, args=[{"tuple": [X, {"dict": {"loss:sum": X}}]}]),
    changed(at=-1, args=[{"tuple": [1.0, {"dict": {}}]}]),
    changed(at=4, name="sub"),
    with_nodes(*[step(f"n{index}", "torch.exp", X) for index in range(MAX_NODES)], result="n1"),
]


@pytest.mark.parametrize("data", REFUSED)
def test_a_graph_that_no_loss_has_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="loss"):
        load_graph(data)


def grown(times: int) -> list[dict[str, Any]]:
    """Each step has the square of the elements of the former."""
    steps = [step("s0", "torch.unsqueeze", X, 0), step("t0", "torch.unsqueeze", X, 1)]
    for index in range(times):
        product = step(f"p{index}", "operator.mul", {"ref": f"s{index}"}, {"ref": f"t{index}"})
        flat = step(f"f{index}", "torch.flatten", {"ref": f"p{index}"})
        rows = [
            step(f"{kind}{index + 1}", "torch.unsqueeze", {"ref": f"f{index}"}, place)
            for kind, place in (("s", 0), ("t", 1))
        ]
        steps += [product, flat, *rows]
    return steps


FAILING = [
    with_nodes(*grown(4), step("loss", "torch.sum", {"ref": "f3"}), result="loss"),
    with_nodes(
        step("e", "expand", X.copy(), 1_000_000, 64, op="call_method"), step("loss", "torch.sum", {"ref": "e"}), result="loss"
    ),
    with_nodes(step("n", "operator.pow", 10, 400), step("loss", "operator.mul", X, {"ref": "n"}), result="loss"),
    with_nodes(step("n", "operator.mul", 2**52, 2**52), step("loss", "operator.mul", X, {"ref": "n"}), result="loss"),
    with_nodes(step("n", "operator.mul", "a" * 60, 2**40), result="n"),
    with_nodes(step("n", "operator.mul", [0], 2**40), result="n"),
    with_nodes(step("n", "torch.gather", X, 0, X), result="n"),
    with_nodes(step("n", "operator.getitem", X, 64), result="n"),
    with_nodes(step("n", "operator.getitem", X, {"slice": [X, None, None]}), result="n"),
    with_nodes(step("n", "torch.exp", X), result="n"),
    with_nodes(step("n", "to", X, "cuda", op="call_method"), step("loss", "torch.sum", {"ref": "n"}), result="loss"),
    with_nodes(step("n", "torch.sum", 3), result="n"),
    with_nodes(
        *[step(f"n{index}", "torch.stack", [{"ref": f"n{index - 1}"} if index else X] * 64) for index in range(6)],
        step("loss", "torch.sum", {"ref": "n5"}), result="loss",
    ),
]  # fmt: skip


@pytest.mark.parametrize("data", FAILING)
def test_a_graph_that_computes_what_it_must_not_fails_before_it_does(data: bytes) -> None:
    with pytest.raises(ValueError, match="loss"):
        run_graph(read_graph(data), {"logprobs": torch.zeros(64)}, [2**26])


SUM = step("loss", "torch.sum", X)
EXPENSIVE = [
    [  # an empty tensor, whose sum is not
        step("none", "operator.getitem", X, {"slice": [0, 0, None]}),
        step("wide", "reshape", {"ref": "none"}, 0, 2**21, op="call_method"),
        step("sum", "torch.sum", {"ref": "wide"}, 0),
    ],
    [  # lists of lists: each step has the power of the former
        step(f"n{index}", "operator.getitem", [{"ref": f"n{index - 1}"} if index else 1] * 12, {"slice": [None] * 3})
        for index in range(6)
    ],
    [step(f"n{index}", "torch.unbind", X) for index in range(300)],
    [step("none", "operator.getitem", X, {"slice": [0, 0, None]}), step("n", "torch.chunk", {"ref": "none"}, 2**16)],
    [
        step("e", "expand", X, 2**11, 64, op="call_method"),
        *[step(f"n{index}", "torch.where", {"ref": "e"}) for index in range(2)],
    ],
]


@pytest.mark.parametrize("nodes", EXPENSIVE)
def test_a_loss_has_no_more_memory_and_work_than_it_may(nodes: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="loss"):
        run_graph(read_graph(with_nodes(*nodes, SUM, result="loss")), {"logprobs": torch.ones(64)}, [2**20])


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=9)
    | st.just(X)
    | st.just({"dtype": "int64"}),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["ref", "tuple", "slice", "dim"]), inner, max_size=2)
    ),
    max_leaves=6,
)
targets = st.sampled_from(
    [
        "torch.exp",
        "operator.mul",
        "operator.getitem",
        "torch.where",
        "getattr",
        "torch.cat",
        "operator.pow",
        "torch.view_as",
    ]
)


@given(st.lists(st.tuples(targets, st.booleans(), st.lists(json_values, max_size=3)), min_size=1, max_size=5))
def test_any_graph_is_refused_or_computed(steps: list[tuple[str, bool, list[Any]]]) -> None:
    nodes = [
        step(
            f"n{index}",
            target.rpartition(".")[2] if is_method else target,
            *args,
            op="call_method" if is_method else "call_function",
        )
        for index, (target, is_method, args) in enumerate(steps)
    ]
    try:
        run_graph(read_graph(with_nodes(*nodes, result=f"n{len(steps) - 1}")), {"logprobs": torch.zeros(3)}, [10_000])
    except ValueError:
        pass
