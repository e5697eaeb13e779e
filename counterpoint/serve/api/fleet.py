"""`/jobs/{job}/fleet`: the servers, as all runs see them together, and the trainer's runs and slots."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

from counterpoint.job.reading.activity import fleet
from counterpoint.job.reading.rollouts.rollout_records import finite_number, whole_number
from counterpoint.job.reading.rollouts.view import name_of as shown
from counterpoint.serve.endpoint import Endpoint, reads
from counterpoint.serve.jobs import Jobs
from counterpoint.transport.config import Config


class FleetParameters(Config):
    """Which job."""

    job: str
    """The job's id."""


class ServerView(Config):
    """What one run says of a server."""

    run: str
    """The run's id."""
    state: str
    """`unknown`, `loading`, `serving`, `draining` or `out`."""
    reason: str
    """Why it does not serve."""
    version: int | None
    """The policy version that it holds for this run."""
    in_flight: int | None
    """This run's requests there."""
    limit: int | None
    """The most of them."""


class Outage(Config):
    """The last time a server went out of service."""

    time: float | None
    """The time when it began, in Unix seconds."""
    reason: str
    """The reason of the outage."""


class EngineLoad(Config):
    """What the server tells of itself, all runs together."""

    running: int | None
    """The requests that are being computed."""
    waiting: int | None
    """Requests in its queue."""
    cache_use: float | None
    """Share of the KV cache that is held."""
    preemptions: int | None
    """Requests evicted from the cache since its start."""


class FleetServer(Config):
    """One server."""

    url: str
    """The base URL of the server."""
    state: Literal["out", "unknown", "draining", "loading", "serving"]
    """The worst that a run says."""
    reason: str
    """Why it does not serve; empty if it does."""
    in_flight: int | None
    """Requests of all runs."""
    limit: int | None
    """The most of them."""
    requests_per_second: float | None
    """Answered, over the last half minute."""
    tokens_per_second: float | None
    """Completion tokens, over the last half minute."""
    cache_hit_share: float | None
    """Share of the prompts' tokens that its prefix cache had."""
    requests: int | None
    """Answered since the orchestrators' start."""
    failures: int | None
    """Requests that failed there."""
    outages: int | None
    """Times that it was taken out of service."""
    restarts: int | None
    """Times that it came back as another process."""
    last_outage: Outage | None
    """The last one; null if there was none."""
    engine: EngineLoad | None
    """Null where it tells nothing."""
    views: list[ServerView]
    """What each run says."""


class FleetRun(Config):
    """One run at the trainer."""

    run: str
    """The run's id."""
    stage: str
    """The stage of the run: `training`, `waiting`, `evicted` and so on."""
    reason: str
    """Why it is not trained."""
    slot: int | None
    """Its slot; null without one."""
    step: int | None
    """The last step trained."""
    steps: int | None
    """How many steps these are of."""
    durable_step: int | None
    """Up to which its batches are durable."""
    open_step: int | None
    """The step being trained."""
    batches_waiting: int | None
    """Batches that the trainer has and does not train yet."""
    connected: bool
    """Whether its orchestrator is."""


class FleetTrainer(Config):
    """The trainer."""

    time: float | None
    """The time when it last said so, in Unix seconds. While a row is trained it says nothing."""
    ended: bool
    """Whether it has ended."""
    slots: int | None
    """Runs that it trains at once."""
    runs: list[FleetRun]
    """The runs of the trainer."""


class FleetAnswer(Config):
    """Servers and slots of a job."""

    current: bool
    """Whether an orchestrator lives that says so; otherwise this is how things were when the last one ended."""
    time: float | None
    """The time when the newest of them wrote, in Unix seconds."""
    waiting: int | None
    """Requests of all runs that wait for a server."""
    capacity: int | None
    """Requests that all runs may have at the servers."""
    servers: list[FleetServer]
    """The servers, in the order of their URLs."""
    trainer: FleetTrainer | None
    """The trainer; null without one."""


@reads("/jobs/{job}/fleet", "Shows servers and slots.")
def show_fleet(jobs: Jobs, given: FleetParameters) -> FleetAnswer:
    """Answers the fleet."""
    job = jobs.get(given.job)
    now = time.time()
    views = fleet.read_views(job.directory)
    current = [view for view in views if view.is_current(now)]
    counted = current or views[:1]
    trainer = fleet.read_trainer(job.directory)
    return FleetAnswer(
        current=bool(current),
        time=counted[0].time if counted else None,
        waiting=_sum(view.content.get("waiting") for view in counted),
        capacity=_sum(view.content.get("capacity") for view in counted),
        servers=[_server(server) for server in fleet.join(counted)],
        trainer=None if trainer is None else _trainer(trainer),
    )


def _server(server: fleet.ViewedServer) -> FleetServer:
    newest = server.newest
    outage, engine = newest.get("last_outage"), newest.get("engine")
    return FleetServer(
        url=shown(server.url),
        state=server.state,
        reason=shown(server.reason),
        **{name: whole_number(server.total(name)) for name in ("in_flight", "limit", "requests", "failures")},
        **{name: server.total(name) for name in ("requests_per_second", "tokens_per_second")},
        **{name: whole_number(server.most(name)) for name in ("outages", "restarts")},
        cache_hit_share=server.cache_hit_share(),
        last_outage=Outage(time=finite_number(outage.get("time")), reason=shown(outage.get("reason")))
        if isinstance(outage, dict)
        else None,
        engine=EngineLoad(
            cache_use=finite_number(engine.get("cache_use")),
            **{name: whole_number(engine.get(name)) for name in ("running", "waiting", "preemptions")},
        )
        if isinstance(engine, dict)
        else None,
        views=[
            ServerView(
                run=shown(run),
                state=shown(view.get("state")),
                reason=shown(view.get("reason")),
                **{name: whole_number(view.get(name)) for name in ("version", "in_flight", "limit")},
            )
            for run, _, view in server.views
        ],
    )


def _trainer(content: Mapping[str, Any]) -> FleetTrainer:
    return FleetTrainer(
        time=finite_number(content.get("time")),
        ended=content.get("ended") is True,
        slots=whole_number(content.get("slots")),
        runs=[
            FleetRun(
                run=shown(run.get("run")),
                stage=shown(run.get("stage")),
                reason=shown(run.get("reason")),
                connected=run.get("connected") is True,
                **{
                    name: whole_number(run.get(name))
                    for name in ("slot", "step", "steps", "durable_step", "open_step", "batches_waiting")
                },
            )
            for run in fleet.runs_of(content)
        ],
    )


def _sum(values: Any) -> int | None:
    found = [number for value in values if (number := whole_number(value)) is not None]
    return sum(found) if found else None


ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (show_fleet,)
