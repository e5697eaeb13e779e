"""The verdict of `make demo-multi`: which steps it looks at, and that each claim can fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from counterpoint.inference.base import SamplingParameters
from counterpoint.inference.config import PoolConfig
from counterpoint.inference.pool.pool import InferencePool
from perf.demos.demo_multi import Event, Row, around, longest_of, repeated_requests
from tests.support.fake_inference import FakeServer

ROW = Row("a", 50, 0.4, 0.9, 2.0, {"eviction": 4.0, "joining": None}, 4.0, failed=0, repeated=0, ended="done")


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


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (replace(ROW, last=0.45), "a: reward 0.400 to 0.450 is no rise by 0.1"),
        (replace(ROW, longest={"eviction": 4.01}), "a: a step of 4.01 s around the eviction is longer than 2 medians"),
        (replace(ROW, failed=3), "a: 3 rollouts failed, 0 requests were tried again"),
        (replace(ROW, repeated=1), "a: 0 rollouts failed, 1 requests were tried again"),
        (replace(ROW, ended="stopped after step 7"), "a: ended as 'stopped after step 7'; expected 'done'"),
    ],
)
def test_every_claim_can_fail(changed: Row, said: str) -> None:
    assert list(ROW.flaws("done")) == list(changed.doubts()) == []
    (flaw,) = changed.flaws("done")
    assert flaw.startswith(said)


def test_a_long_step_around_an_event_is_no_flaw_where_others_take_as_long() -> None:
    noisy = replace(ROW, longest={"eviction": 14.0, "joining": 3.0}, longest_apart=17.5)
    assert list(noisy.flaws("done")) == []
    (doubt,) = noisy.doubts()
    assert "a: a step of 14.00 s around the eviction" in doubt
    assert "17.50 s" in doubt


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
