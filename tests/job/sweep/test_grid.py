"""What a grid expands to, and the ids of its targets."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.job.sweep.grid import expand, id_of, with_value_at
from counterpoint.transport.config import IDENTIFIER_PATTERN

LONGEST = 40

paths = st.sampled_from(
    ["seed", "training.learning_rate", "training.weight", "environments.0.kind", "environments.1.kind", "a"]
)
values: st.SearchStrategy[Any] = st.one_of(
    st.integers(-100, 100),
    st.booleans(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(0, 3), min_size=1, max_size=2).map(lambda table: [table]),
)
settings = st.dictionaries(paths, values, min_size=1, max_size=4)


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for path, value in flat.items():
        table = with_value_at(table, path, value)
    return table


@given(settings)
def test_an_id_is_safe_as_a_file_name_and_the_same_each_time(target: dict[str, Any]) -> None:
    found = id_of(target, LONGEST)
    assert re.fullmatch(IDENTIFIER_PATTERN, found)
    assert len(found) <= LONGEST
    assert found == id_of(dict(target), LONGEST)


lists = st.one_of(
    st.lists(st.floats(0, 1), min_size=1, max_size=4, unique=True),
    st.lists(st.text(max_size=30), min_size=1, max_size=4, unique=True),
)


@given(st.dictionaries(paths, lists, min_size=1, max_size=3))
def test_a_grid_is_every_combination_once(grid: dict[str, list[Any]]) -> None:
    points = expand(nested(grid), [], [], LONGEST)
    assert len(points) == math.prod(map(len, grid.values()))
    assert len({point.target_id for point in points}) == len(points)
    for point in points:
        assert point.values.keys() == grid.keys()
        assert all(value in grid[path] for path, value in point.values.items())


@given(settings, settings)
def test_a_target_sets_its_values_and_leaves_the_rest(base: dict[str, Any], target: dict[str, Any]) -> None:
    before = nested(base) | {"kept": {"too": 1}}
    after = with_value_at(before, "new.key", target)
    assert after["new"]["key"] == target
    assert {key: value for key, value in after.items() if key != "new"} == before


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"training.learning_rate": 0.001, "seed": 1}, "learning_rate-0.001__seed-1"),
        ({"training.learning_rate": 1e-5}, "learning_rate-1e-05"),
        ({"environments.0.kind": "reverse-text"}, "kind-reverse-text"),
        ({"environments.0.kind": "a", "environments.1.kind": "b"}, "environments.0.kind-a__environments.1.kind-b"),
        ({"dump": True, "delta": -1}, "dump-true__delta--1"),
    ],
)
def test_an_id_is_readable(values: dict[str, Any], expected: str) -> None:
    assert id_of(values, 64) == expected


def test_what_an_id_cannot_hold_has_a_digest() -> None:
    assert re.fullmatch(r"a-1__b-2\.[0-9a-f]{8}", id_of({"a": "1__b-2"}, 64))
    first, second = (id_of({"model": model}, 64) for model in ("a/b", "a b"))
    assert re.fullmatch(r"model-a-b\.[0-9a-f]{8}", first)
    assert first != second
    long = id_of({"environments.0.name": "x" * 60}, 30)
    assert len(long) == 30
    assert re.fullmatch(r"name-x+\.[0-9a-f]{8}", long)


def test_zipped_lists_are_one_dimension() -> None:
    grid = {"seed": [1, 2]}
    zipped = [{"training": {"learning_rate": [1e-3, 1e-4], "warmup_steps": [3, 9]}}]
    assert [tuple(point.values.values()) for point in expand(grid, zipped, [], 64)] == [
        (1, 1e-3, 3), (1, 1e-4, 9), (2, 1e-3, 3), (2, 1e-4, 9)
    ]  # fmt: skip


def test_targets_are_listed_one_by_one() -> None:
    points = expand({}, [], [{"seed": 1, "training": {"weight": 2.0}}, {"seed": 2}], 64)
    assert [point.values for point in points] == [{"seed": 1, "training.weight": 2.0}, {"seed": 2}]
    assert [point.target_id for point in points] == ["seed-1__weight-2.0", "seed-2"]


def test_values_reach_into_lists() -> None:
    base = {"environments": [{"name": "a", "ratio": 1.0}, {"name": "b"}]}
    assert with_value_at(base, "environments.1.ratio", 2.0) == {
        "environments": [{"name": "a", "ratio": 1.0}, {"name": "b", "ratio": 2.0}]
    }
    assert with_value_at(base, "environments", []) == {"environments": []}
    for path in ("environments.2.ratio", "environments.b.ratio"):
        with pytest.raises(ValueError, match="2 entries, counted from 0"):
            with_value_at(base, path, 2.0)


@pytest.mark.parametrize(
    ("grid", "zipped", "listed", "expected"),
    [
        ({}, [], [], "there is no target"),
        ({"seed": []}, [], [], r"grid.seed = \[\]: expected at least one value"),
        ({"seed": 1}, [], [], "grid.seed = 1: expected a list"),
        ({"training": {}}, [], [], "grid.training is an empty table"),
        ({"a": {"b": [1]}, "a.b": [2]}, [], [], "grid.a.b is given twice"),
        ({"seed": [1, 2, 1]}, [], [], "two targets have the id seed-1: one sets seed = 1, the other seed = 1"),
        ({"seed": [1]}, [{"seed": [1]}], [], "seed is given twice"),
        ({}, [{"seed": [1], "steps": [1, 2]}], [], r"zip\[0\].*length: seed has 1, steps has 2"),
        ({}, [{"seed": [1]}, {}], [], r"zip\[1\] is an empty table"),
        ({"seed": [1]}, [], [{"seed": 1}], "one or the other"),
        ({}, [], [{"seed": 1}, {"steps": {}}], r"targets\[1\].steps is an empty table"),
        ({}, [], [{"seed": 1}, {"seed": "1"}], "two targets have the id seed-1"),
    ],
)
def test_a_grid_that_is_none_is_refused(
    grid: dict[str, Any], zipped: list[dict[str, Any]], listed: list[dict[str, Any]], expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        expand(grid, zipped, listed, 64)
