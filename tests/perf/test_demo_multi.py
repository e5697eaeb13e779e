"""The verdict of `make demo-multi`: which steps it looks at, and that each claim can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.inference.base import SamplingParameters
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool
from perf.demo_multi import Event, around, findings, line_of, longest_of, repeated_requests
from tests.support.fake_inference import FakeServer

SUMMARY: dict[str, Any] = {
    "steps": {"trained": 50},
    "reward": {"first": 0.4, "last": 0.9},
    "rollouts": {"failed": 0},
    "outcome": "done",
}
EVENTS = (Event("eviction", "b", 4.5, 5.0),)


@pytest.mark.parametrize(
    ("began", "ended", "longest"),
    [
        (3.0, 3.5, 4.0),  # within the step from 2 to 6
        (1.5, 6.5, 4.0),  # from one step over the next into a third
        (6.2, 6.3, 1.0),  # the step from 6 to 7, and the one after it; not the long one after that
        (7.5, 7.6, 12.0),
        (19.5, 19.6, 12.0),
        (21.0, 22.0, None),  # after its last step
    ],
)
def test_the_steps_around_an_event_are_those_under_way_and_the_next(
    began: float, ended: float, longest: float | None
) -> None:
    times = [0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 20.0]
    assert longest_of(around(Event("eviction", "b", began, ended), times)) == longest


STEADY = [0.0, 2.0, 4.0, 6.0, 8.0]


@pytest.mark.parametrize(
    ("changed", "times", "repeated", "said"),
    [
        ({"reward": {"first": 0.4, "last": 0.45}}, STEADY, 0, "✗ a: reward 0.400 to 0.450 is no rise by 0.1"),
        (
            {},
            [0, 2, 4, 8.01, 10, 12],
            0,
            "✗ a: a step of 4.01 s around the eviction is longer than 2 medians of 2.00 s",
        ),
        (
            {},
            [0, 2, 4, 9, 11, 13, 20],
            0,
            "? a: a step of 5.00 s around the eviction is longer than 2 medians of 2.00 s; away",
        ),
        ({"rollouts": {"failed": 3}}, STEADY, 0, "✗ a: 3 rollouts failed, 0 requests were tried again"),
        ({}, STEADY, 1, "✗ a: 0 rollouts failed, 1 requests were tried again"),
        ({"outcome": "stopped after step 7"}, STEADY, 0, "✗ a: ended as 'stopped after step 7'; expected 'done'"),
    ],
)
def test_every_claim_can_fail(changed: dict[str, Any], times: list[float], repeated: int, said: str) -> None:
    """The ? is where a step away from the events takes as long: that machine is too noisy."""
    assert list(findings("a", SUMMARY, STEADY, EVENTS, 0)) == []
    [(mark, words)] = findings("a", SUMMARY | changed, times, EVENTS, repeated)
    assert f"{mark} {words}".startswith(said)


def test_a_run_s_line_leaves_out_its_own_event() -> None:
    assert line_of("a", SUMMARY, STEADY, EVENTS) == (
        "a: 50 steps, reward 0.400 → 0.900; median step 2.00 s, longest around the eviction 2.00 s"
    )
    assert line_of("b", SUMMARY, STEADY, EVENTS).endswith("median step 2.00 s")


async def test_a_request_that_the_pool_tries_again_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeServer() as server:
        pool = InferencePool(PoolConfig(urls=[server.url], startup_timeout_seconds=60)).model("a-model")
        try:
            await pool.start()
            server.drop_next = 1
            sampling = SamplingParameters(temperature=1.0, max_tokens=3)
            await pool.generate(np.array([7, 8], dtype=np.int32), sampling, affinity="12-3")
        finally:
            await pool.release()
    (tmp_path / "run_a").mkdir()
    (tmp_path / "orchestrator_a.log").write_text(caplog.text)  # where a job's orchestrator of several runs writes
    assert repeated_requests(tmp_path, "a") == 1
