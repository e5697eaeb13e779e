"""A loss as the SDK traces and encodes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss


def traced(function: Callable[..., Any], ranks: dict[str, Any]) -> bytes:
    """The graph of a function, with the ranks of its inputs, as JSON."""
    handle = trace_loss(function, ranks, "session")
    inputs = [each.model_dump() for each in handle.inputs]
    return msgspec.json.encode({"inputs": inputs, "graph": encode_graph(handle).model_dump()})
