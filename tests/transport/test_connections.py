"""Connections are shared: who opens many keeps out neither another key nor a stranger."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from counterpoint.transport.http.connections import BoundedConnections


class Handler:
    """A server whose connections are in a list."""

    def __init__(self) -> None:
        self.connections: list[Connection] = []

    def __call__(self) -> Any:
        made = Connection(self)
        self.connections.append(made)
        return made


class Connection:
    """One of them; it is closed once it has its answer, which is at once."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.transport: object | None = object()

    def close(self) -> None:
        self.transport = None
        self._handler.connections.remove(self)

    force_close = close


def opened(bounded: BoundedConnections, handler: Handler, owner: str) -> bool:
    """Opens a connection and sends a key on it; returns whether it may stay."""
    made: Any = bounded.connect()
    return made in handler.connections and bounded.prove(made, owner)


def test_one_key_has_half_and_another_still_finds_room() -> None:
    handler = Handler()
    bounded = BoundedConnections(handler, 100)
    assert sum(opened(bounded, handler, "a") for _ in range(1000)) == 50
    assert sum(opened(bounded, handler, "b") for _ in range(1000)) == 25
    strangers: list[Any] = [bounded.connect() for _ in range(1000)]
    assert strangers[-1] in handler.connections
    assert opened(bounded, handler, "c")
    assert len(handler.connections) <= 100
    for each in list(handler.connections):
        each.close()
    assert sum(opened(bounded, handler, "b") for _ in range(1000)) == 50, "what has ended counts no more"


def test_a_connection_goes_on_however_many_there_are() -> None:
    handler = Handler()
    bounded = BoundedConnections(handler, 10)
    first: Any = bounded.connect()
    assert bounded.prove(first, "a")
    for _ in range(100):
        opened(bounded, handler, "a")
        bounded.connect()
    assert bounded.prove(first, "a")
    assert first in handler.connections


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["open", "silent", "close"])), max_size=300))
def test_whatever_is_opened_and_closed_a_newcomer_is_answered(steps: list[tuple[int, str]]) -> None:
    handler = Handler()
    bounded = BoundedConnections(handler, 40)
    for number, what in steps:
        match what:
            case "open":
                opened(bounded, handler, f"key {number}")
            case "silent":
                bounded.connect()
            case _ if handler.connections:
                handler.connections[number % len(handler.connections)].close()
        assert len(handler.connections) <= 40
    assert opened(bounded, handler, "newcomer")
