"""The line of every key of a TOML file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.transport.configuration.lines import Lines

names = st.text("ab.[ =", min_size=1, max_size=3)
values = st.recursive(
    st.integers(-5, 5) | st.text("a[]=\"'# \n\u2028\x85", max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(names, values, max_size=4))
def test_every_value_of_a_file_has_a_line(table: dict[str, Any]) -> None:
    """Whatever its keys and texts look like: one of those that mention it."""
    lines = Lines(text := tomli_w.dumps(table))
    for location in _leaves(table):
        found = lines.of(location)
        assert found is not None
        assert text.split("\n")[found.number - 1] == found.text
        name = next(part for part in reversed(location) if isinstance(part, str))
        assert name in found.text


def _leaves(content: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    entries = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for name, value in entries:
        if isinstance(value, dict | list):
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name)
