"""A whole run that is scored by a rubric: its parts are metrics of the step, and a judge that fails costs rollouts only."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from aiohttp import web

from counterpoint.orchestrator.daemon import run
from counterpoint.run.config import RunConfig, ScheduleConfig
from tests.environments.rewards.judge.fake_judge import FakeJudge, says
from tests.orchestrator.daemons import metrics_of, records_of
from tests.orchestrator.scripted_trainer import ScriptedTrainer

pytestmark = pytest.mark.slow


@contextmanager
def served(judge: FakeJudge) -> Iterator[str]:
    """Serves a judge from a thread; the daemon has the main one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake judge")
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(judge.__aenter__(), loop).result(60).url
        asyncio.run_coroutine_threadsafe(judge.__aexit__(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


async def sometimes_lies(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Lies about every fourth completion, and scores the others by their length."""
    completion = body["messages"][0]["content"]
    score = 99 if sum(map(ord, completion)) % 4 == 0 else min(len(completion), 10)
    return await says(f'{{"score": {score}}}', {"prompt_tokens": 1, "completion_tokens": 1})(request, body)


def test_a_rubric_scores_a_run(make_config: Callable[..., RunConfig]) -> None:
    with served(FakeJudge(sometimes_lies)) as url:
        judge = {
            "kind": "judge", "base_url": url, "model": "m", "prompt": "{completion}", "score_key": "score", "retries": 0,
        }  # fmt: skip
        args = {
            "data": {"rows": [{"question": f"{n} + 1", "answer": str(n + 1)} for n in range(50)]},
            "rubric": [
                {"kind": "exact", "weight": 1.0},
                {"kind": "regex", "name": "vowels", "pattern": "[aeiou]", "weight": 0.5},
                {
                    "kind": "function",
                    "name": "length",
                    "path": "tests.environments.rewards.attempts:length",
                    "weight": 0.0,
                },
                judge,
            ],
        }
        environment = {"name": "sums", "kind": "single-turn", "args": args, "state_columns": ["completion", "judge"]}
        config = make_config(
            steps=3,
            environments=[environment],
            schedule=ScheduleConfig(group_size=4, rollouts_per_step=16, max_inflight_rollouts=32),
            filters=[],
        )
        with ScriptedTrainer(config.output_dir, "one", 3) as trainer:
            assert run(config, lambda: None) == 0
            assert trainer.steps_trained == [1, 2, 3]
    lines = metrics_of(config)
    for line in lines:
        means = {
            name: line[f"environment/sums/{name}/mean"] for name in ("total", "exact", "vowels", "length", "judge")
        }
        assert means["total"] == pytest.approx(line["reward/sums/mean"])
        assert means["total"] == pytest.approx(means["exact"] + 0.5 * means["vowels"] + means["judge"])
    failed = [record for record in records_of(config) if record["outcome"] == "failed"]
    lied = "JudgeFailed: part 'judge': .* gave no score to one request: the score 99 is out of range"
    assert sum(line.get("failures/sums/JudgeFailed", 0) for line in lines) == len(failed) > 0
    for record in records_of(config):
        if record["outcome"] == "failed":
            assert record["reward"] is None
            assert re.match(lied, record["error"])
        else:
            assert 0.0 <= record["metrics"]["judge"] <= 1.0
            assert record["state"]["judge"]["judge"]["value"] == record["metrics"]["judge"]
