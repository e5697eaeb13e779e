"""The guard against gross regressions of benchmarks that decide nothing beside other tests; these run after all others."""

from __future__ import annotations

import pytest

from tests.perf.guard import assert_not_grossly_worse


@pytest.mark.slow
@pytest.mark.parametrize("case", ["step", "schedule"])
def test_no_benchmark_is_grossly_worse_than_it_was(case: str) -> None:
    assert_not_grossly_worse(case)
