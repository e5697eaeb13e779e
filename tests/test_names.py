"""A public class has a name of its own across the house, so that a reader who meets the name knows which class it is."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.test_imports import FILES

pytestmark = pytest.mark.slow  # every file of the house is parsed

SHARED = {
    "ChangeEntry": 2,
    "JobParameters": 2,
    "Kind": 2,
    "Resources": 2,
    "RunParameters": 3,
    "Saved": 2,
    "WorkerEntry": 2,
}
"""How many classes share each name: models of the admin API whose OpenAPI document names them (`Saved` is also in the tuner's
journals), and `Resources`, which users import from two packages. No entry may be added, nor a number raised: give the new class a
name of its own, or, where only its own module uses it, an underscore."""


def shared_names() -> dict[str, int]:
    """The names of the installed packages' public classes which more than one class has."""
    trees = [ast.parse(path.read_bytes()) for name, path in FILES.items() if name.split(".")[0] != "perf"]
    names = Counter(
        node.name
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return {name: count for name, count in sorted(names.items()) if count > 1}


def test_a_public_class_has_a_name_of_its_own() -> None:
    assert shared_names() == SHARED
