"""Jobs whose roles have written spans, decisions and states, by the functions that real ones use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson

from counterpoint.orchestrator.activity import FLEET_FILE
from counterpoint.orchestrator.decisions import Decision, DecisionLog
from counterpoint.transport.telemetry.spans import SPANS_FILE, SpanLog

SERVERS = ("http://127.0.0.1:8001", "http://127.0.0.1:8002")
STEP_SECONDS = 10.0
BEGAN = 1_700_000_000.0


def write_spans(job: Path, run: str, steps: int, first: int = 1) -> None:
    """Steps of ten seconds: the first server serves eight of them, the second two; the trainer trains five of the next step."""
    (job / f"run_{run}").mkdir(parents=True, exist_ok=True)
    (job / "trainer").mkdir(exist_ok=True)
    own = SpanLog(job / f"run_{run}" / SPANS_FILE, "orchestrator", run)
    trainer = SpanLog(job / "trainer" / SPANS_FILE, "trainer")
    for step in range(first, first + steps):
        begin = BEGAN + STEP_SECONDS * (step - 1)
        own.record("step", begin, begin + 10, step=step, samples=8)
        for name, since, until in (("generation", 0, 8), ("finalize", 8, 8.5), ("merge", 8.5, 9), ("commit", 9, 10)):
            own.record(name, begin + since, begin + until, step=step)
        own.record("deliver", begin + 9, begin + 9.2, step=step, bytes=1000)
        own.record("load_weights", begin + 1, begin + 2, step=step, version=step - 1)
        for url, since, until in ((SERVERS[0], 0.0, 8.0), (SERVERS[1], 1.0, 3.0)):
            own.record("serve", begin + since, begin + until, step=step, role="inference", server=url)
        after = begin + STEP_SECONDS
        trainer.record("step", after, after + 5, step=step, run=run)
        trainer.record("wait", after - 5, after, step=step, run=run)
        for name, since, until in (("forward", 0, 2), ("backward", 2, 4), ("optimizer", 4, 4.5), ("broadcast", 4.5, 5)):
            trainer.record(name, after + since, after + until, step=step, run=run)
        trainer.record("write_checkpoint", after + 5, after + 9, step=step, run=run)
    own.flush()
    trainer.flush()


def write_decisions(job: Path, run: str, steps: int) -> None:
    """In each step two groups ship, of which one has a filtered rollout, and one is dropped as stale."""
    (job / f"run_{run}").mkdir(parents=True, exist_ok=True)
    log = DecisionLog(job / f"run_{run}")
    for step in range(1, steps + 1):
        groups = range(3 * step, 3 * step + 3)
        for group in groups:
            log.of_group(group, Decision.STARTED, environment="toy", example_index=group, rollouts=4)
        log.of_group(groups[2], Decision.DROPPED, reason="stale", detail="too old", step=step - 1)
        for group in groups[:2]:
            log.of_group(group, Decision.FINALIZED, kept=4 - group % 2, filtered=group % 2, failed=0)
            log.of_group(group, Decision.SHIPPED, step=step)
    log.flush()


def fleet(run: str, **values: Any) -> dict[str, Any]:
    """What a run says of two servers."""
    servers = [
        {
            "url": url, "state": "serving", "reason": "", "version": 3, "in_flight": 4, "limit": 16, "requests": 100,
            "failures": 1, "outages": 2, "restarts": 1, "last_outage": {"time": BEGAN, "reason": "connection refused"},
            "requests_per_second": 2.0, "tokens_per_second": 100.0, "cache_hit_share": 0.5,
            "engine": {"running": 3, "waiting": 1, "cache_use": 0.25, "preemptions": 0},
        }
        for url in SERVERS
    ]  # fmt: skip
    return {
        "format": 1, "run": run, "time": time.time(), "step": 3, "ended": False, "waiting": 5, "capacity": 32, "servers": servers,
    } | values  # fmt: skip


def write_fleet(job: Path, run: str, content: Any) -> None:
    (job / f"run_{run}").mkdir(parents=True, exist_ok=True)
    (job / f"run_{run}" / FLEET_FILE).write_bytes(orjson.dumps(content))
