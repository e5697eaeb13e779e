"""A boolean is no number in the arguments of an operator's own class or function either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest

from counterpoint.transport.configuration.arguments import refuse_booleans

if TYPE_CHECKING:
    from collections import OrderedDict as Unknown


class Above:
    """A class that is extended."""

    def __init__(self, depth: int = 1) -> None:
        self.depth = depth


class Below(Above):
    """It passes the rest on."""

    def __init__(
        self, largest: int | None, unknown: Unknown[str, int] | None = None, rest: float = 1.0, **more: Any
    ) -> None:
        super().__init__(**more)


def loss(  # type: ignore[no-untyped-def]  # as people write them
    inputs: object,
    clip: float,
    parts: Sequence[int] = (),
    limit=3,
    switch: bool | int = 1,
    table: dict[str, float] | None = None,
):
    """A function of somebody's, of which one parameter has only a default."""


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (Below, {"largest": True}),
        (Below, {"rest": False}),
        (Below, {"depth": True}),
        (loss, {"clip": True}),
        (loss, {"parts": [1, True]}),
        (loss, {"limit": True}),
        (loss, {"table": {"a": True}}),
    ],
)
def test_a_boolean_is_refused_where_a_number_is_expected(function: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        refuse_booleans(function, arguments)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (Below, {"largest": 3, "unknown": True, "rest": "text", "more": True, "depth": 2}),
        (loss, {"switch": True, "clip": 1, "parts": "no list", "limit": 2}),
    ],
)
def test_all_else_is_the_functions_own_to_judge(function: Any, arguments: dict[str, Any]) -> None:
    refuse_booleans(function, arguments)
