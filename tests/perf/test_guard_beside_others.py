"""The guard against gross regressions of benchmarks whose bounds hold beside other tests, too: noise never makes one hold."""

from __future__ import annotations

import pytest

from tests.perf.guard import assert_not_grossly_worse


@pytest.mark.slow
@pytest.mark.parametrize("case", ["send", "receive", "memory", "multi-run"])
def test_no_benchmark_is_grossly_worse_than_it_was(case: str) -> None:
    assert_not_grossly_worse(case)
