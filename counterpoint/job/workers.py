"""A job's roles as `cluster` takes them: names, files, commands, time limits and restarts, and which of them a start needs.

Each role has one worker, which people know by the role's name; but a trainer of several ranks is a role of one worker for each of
its nodes and a SubMaster, which runs torch's elastic agents (`counterpoint/cluster/elastic/service.py`). A trainer of one rank is
a plain command: there is nobody to meet.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import orjson

from counterpoint.cluster.spec import JobSpec, RoleSpec, StartGate
from counterpoint.job.check import SAFE_PATH
from counterpoint.job.config import JobConfig
from counterpoint.job.directory import living_runs
from counterpoint.job.placement import devices, placements
from counterpoint.job.reading.run_state import all_committed, is_finished
from counterpoint.job.serving.config import WORKER_VARIABLE, ServeConfig, flags_of
from counterpoint.job.tracking.config import TrackingConfig
from counterpoint.run.config import RunConfig
from counterpoint.service.config import ServiceConfig, TinkerConfig
from counterpoint.trainer.config import READY_SECONDS
from counterpoint.transport.config import Config
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.process.cores import divided
from counterpoint.transport.process.priority import compute_nice, side_nice
from counterpoint.transport.process.ranks.node import LOOPBACK
from counterpoint.transport.process.start_time import LONGEST_STARTS
from counterpoint.transport.telemetry.start_phases import variable_of

BEHIND_SERVERS_NICE = 5
"""Added to the trainer's niceness beside a service: a client waits for each sample, and a token is a step of the server's."""

SILENCE_SECONDS = 60.0
"""Silence after which an orchestrator or a server monitor counts as stuck. An orchestrator's event loop sends its heartbeats."""

TRAINER_SILENCE_SECONDS = 300.0
"""The same for a trainer. A thread sends its heartbeats, since a step may take longer. One call, such as a write of a large
checkpoint to a slow disk, may block this thread, too."""

TRAINER_STOP_SECONDS = 120.0
"""How long it may take to end its step and write its checkpoints."""

SIDE_RESTARTS = 1000
"""How often in a row a worker that the job can do without is started again."""

TRACKING_STOP_SECONDS = 90.0
"""How long the sinks may take to send what is left: `finish_seconds` of `counterpoint/job/tracking/tracking.py`, and some."""

SERVE_STOP_SECONDS = 5.0
"""How long the server of the page may take to end."""

GATHER_SECONDS = 300.0
"""How long the nodes of several ranks may take, in addition, to be checked and to meet."""


def worker_of(config: JobConfig, run: RunConfig) -> str:
    """Returns the name of a run's worker."""
    return f"orchestrator_{run.run_id}" if config.runs else "orchestrator"


def sections_of(config: JobConfig) -> dict[str, Config]:
    """Returns the configuration of each worker by its name."""
    servers = {f"inference_{position}": config.server(position) for position in range(config.inference.replicas)}
    service = {"service": service_of(config, config.tinker)} if config.tinker is not None else {}
    runs = {worker_of(config, run): run for run in config.every_run}
    return {**servers, "trainer": config.trainer, **service, **runs}


def service_of(config: JobConfig, section: TinkerConfig) -> ServiceConfig:
    """Returns the configuration of the service, of which the job knows all but the section."""
    lora, pool, servers = config.inference.lora, config.orchestrator.inference, config.inference
    if servers.replicas and section.keys_file:  # what waits within a server has no order by keys
        most = min(pool.max_concurrent_requests_per_server, servers.max_num_seqs)
        pool = pool.model_copy(update={"max_concurrent_requests_per_server": most})
    return ServiceConfig(
        **section.model_dump(),
        output_dir=config.output_dir.absolute(),
        model=config.trainer.model,
        name=config.model,
        max_samplers=lora.max_adapters if lora is not None else 1,
        max_tokens=config.inference.max_model_len,
        transport=config.transport,
        inference=pool,
    )


def needs_servers(config: JobConfig) -> bool:
    """Returns whether rollouts are still needed.

    They are needed by a run of the job, by a guest that waits for the job's return, or by runs that may join.
    """
    if config.stay or not config.resume or living_runs(config.output_dir):
        return True
    return not all(map(all_committed, config.every_run))


def is_done(config: JobConfig) -> bool:
    """Returns whether a resume finds nothing to start: every run is finished and no other run may need the job."""
    return not needs_servers(config) and all(map(is_finished, config.every_run))


SERVICE_LEASE_SECONDS = 30.0
"""How long the roles of a job go on without a command below a service manager, which starts another: a busy machine is slow."""


def specification(config: JobConfig, files: dict[str, Path]) -> JobSpec:
    """Returns the job's roles in their order of starting. They stop in reverse order, so that the orchestrators can drain.

    A resume leaves out finished runs, and the servers if no rollouts are needed. `files` has each role's file by its name.
    """
    service = {"lease_seconds": SERVICE_LEASE_SECONDS} if "NOTIFY_SOCKET" in os.environ else {}
    roles = (
        role.model_copy(update={"environment": role.environment | variable_of(role.name, config.output_dir)})
        for role in _roles(config, files)
    )
    return JobSpec(name="job", roles=tuple(roles), stay=config.stay, **service)


def _roles(config: JobConfig, files: dict[str, Path]) -> list[RoleSpec]:
    runs = [run for run in config.every_run if not (config.resume and is_finished(run))]
    return (
        ([server_of_the_page(config, config.serve)] if config.serve is not None else [])
        + ([_tracking(config, config.tracking)] if config.tracking is not None else [])
        + (_servers(config, files) if needs_servers(config) else [])
        + [_trainer(config, files["trainer"])]
        + ([_service(config, files["service"])] if config.tinker is not None else [])
        + [_orchestrator(config, run, files) for run in runs]
    )


def _tracking(config: JobConfig, given: TrackingConfig) -> RoleSpec:
    """Sends metrics elsewhere. It is before the roles that write them, so that it stops after them."""
    return side_role("tracking", ("track", str(config.output_dir.absolute()), "--follow"), config, given).model_copy(
        update={"stop_timeout_seconds": TRACKING_STOP_SECONDS}
    )


def server_of_the_page(config: JobConfig, section: ServeConfig) -> RoleSpec:
    """`counterpoint serve` for the job itself. It yields the CPU further by itself."""
    role = side_role("serve", ("serve", str(config.output_dir.absolute()), *flags_of(section)), config, section)
    return role.model_copy(
        update={"stop_timeout_seconds": SERVE_STOP_SECONDS, "environment": role.environment | {WORKER_VARIABLE: "1"}}
    )


def side_role(name: str, arguments: tuple[str, ...], config: JobConfig, section: Config) -> RoleSpec:
    """Returns a role that runs a command of ours beside the job, which goes on whatever becomes of it.

    The command sends `READY=1` and heartbeats as roles do.
    """
    return RoleSpec(
        name=name,
        command=(sys.executable, "-m", "counterpoint.cli.main", *arguments),
        config=_identity(section),
        log_file=config.output_dir.absolute() / f"{name}.log",
        essential=False,
        silence_timeout_seconds=SILENCE_SECONDS,
        nice=side_nice(),  # after the orchestrators, before vLLM and the trainer
        environment=dict(SAFE_PATH),
        max_restarts=SIDE_RESTARTS,
    )


def _trainer(config: JobConfig, file: Path) -> RoleSpec:
    """The trainer: a command, or, if it has several ranks, elastic workers."""
    placed = placements(config)["trainer"]
    role: dict[str, Any] = {
        "name": "trainer",
        "log_file": config.output_dir.absolute() / "trainer" / "trainer.log",
        "stop_timeout_seconds": TRAINER_STOP_SECONDS,
        "nice": compute_nice() + (BEHIND_SERVERS_NICE if config.tinker is not None else 0),
        "environment": environment_of(config, "trainer"),
        "resources": placed.resources,
        "collocate": placed.collocate,
        "max_restarts": config.max_restarts,
    }
    if config.trainer.ranks > 1:
        return RoleSpec(**role | _ranks(config, file))
    return RoleSpec(
        command=_command("trainer", file),
        config=_identity(config.trainer),
        ready_timeout_seconds=READY_SECONDS,
        silence_timeout_seconds=TRAINER_SILENCE_SECONDS,
        restart_arguments=("--resume",),
        **role,
    )


def _ranks(config: JobConfig, file: Path) -> dict[str, Any]:
    """What the role of a trainer with several ranks has of its own. Its nodes are fixed in number."""
    from counterpoint.cluster.elastic.config import ElasticConfig  # for no trainer of one rank

    trainer = config.trainer
    elastic = ElasticConfig(
        module="counterpoint.trainer.rank_process",
        arguments=(str(file.absolute()),),
        restart_arguments=("--resume",),
        local_ranks=trainer.processes,
        check=trainer.nodes
        > 1,  # of a single node nobody could say that it is slow, and its ranks find out whether it works
        host=LOOPBACK if config.backend == "local" else "{address}",
        ready_seconds=READY_SECONDS,
        silence_seconds=TRAINER_SILENCE_SECONDS,
        drain_seconds=TRAINER_STOP_SECONDS - 20,
        version=_identity(trainer)["configuration"],
    )
    return {
        "count": trainer.nodes,
        "worker": "counterpoint.cluster.elastic.service:ServiceWorker",
        "sub_master": "counterpoint.cluster.elastic.service:ServiceMaster",
        "start": StartGate.WORKER,
        "config": elastic.model_dump(mode="json", exclude_defaults=True),
        "environment": environment_of(config, "trainer") | {"OMP_NUM_THREADS": str(trainer.threads or 1)},
        "ready_timeout_seconds": LONGEST_STARTS * READY_SECONDS + GATHER_SECONDS,
        "silence_timeout_seconds": SILENCE_SECONDS,
    }


def _servers(config: JobConfig, files: dict[str, Path]) -> list[RoleSpec]:
    placed = placements(config)
    return [
        RoleSpec(
            name=(name := f"inference_{position}"),
            command=_command("inference", files[name]),
            config=_identity(config.server(position)),
            log_file=config.output_dir.absolute() / f"{name}.log",
            ready_timeout_seconds=config.inference.startup_timeout_seconds + 60,
            silence_timeout_seconds=SILENCE_SECONDS,
            nice=compute_nice(),
            environment=environment_of(config, name),
            resources=placed[name].resources,
            collocate=placed[name].collocate,
            max_restarts=config.max_restarts,
        )
        for position in range(config.inference.replicas)
    ]


def _orchestrator(config: JobConfig, run: RunConfig, files: dict[str, Path]) -> RoleSpec:
    name = worker_of(config, run)
    return RoleSpec(
        name=name,
        command=_command("orchestrator", files[name]),
        config=_identity(run),
        log_file=config.output_dir.absolute() / f"{name}.log",
        task=True,
        after=("trainer",),
        ready_timeout_seconds=math.inf,  # its own waits have deadlines, except that for a slot at the trainer
        silence_timeout_seconds=SILENCE_SECONDS,
        stop_timeout_seconds=run.shutdown_timeout_seconds + 15,
        environment=dict(SAFE_PATH),
        collocate=placements(config)["orchestrator"].collocate,
        max_restarts=config.max_restarts,
        restart_arguments=("--resume",),
    )


def _service(config: JobConfig, file: Path) -> RoleSpec:
    assert config.tinker is not None
    return RoleSpec(
        name="service",
        command=_command("service", file),
        config=_identity(service_of(config, config.tinker)),
        log_file=config.output_dir.absolute() / "service.log",
        after=("trainer",),
        ready_timeout_seconds=math.inf,  # it waits for the servers, with a deadline of its own
        silence_timeout_seconds=SILENCE_SECONDS,
        environment=dict(SAFE_PATH),
        collocate=placements(config)["orchestrator"].collocate,
        max_restarts=config.max_restarts,
    )


def _command(role: str, file: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "counterpoint.cli.main", role, str(file))


def _identity(section: Config) -> dict[str, str]:
    """Tells a role of another configuration from this one, since the commands, which name only files, do not.

    What an earlier command left running is adopted only if it is the same.
    """
    values = section.model_dump(mode="json", exclude={"resume"})
    return {"configuration": hashlib.sha256(dumps(values, option=orjson.OPT_SORT_KEYS)).hexdigest()}


def environment_of(config: JobConfig, name: str) -> dict[str, str]:
    """Returns the variables that a role's environment has in addition to ours; its children inherit them.

    Ray itself sets the GPUs that a role sees, to those that it has reserved for it.
    """
    named = config.gpus.trainer if name == "trainer" else config.gpus.inference
    if config.backend != "local":
        return dict(SAFE_PATH)
    if named is None:
        return SAFE_PATH | _division(config)
    return SAFE_PATH | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices(config)[name]))}


def _division(config: JobConfig) -> dict[str, str]:
    """How trainer and servers divide the cores where they compute on a CPU. It follows from the configuration alone.

    A trainer with several ranks, or one whose `threads` are set, takes what it was given.
    """
    trainer, servers = config.trainer, 0 if config.gpus.inference is not None else config.inference.replicas
    if trainer.threads is None and trainer.ranks == 1:
        return divided(0, 1 + servers)
    return divided(trainer.ranks * (trainer.threads or 1), max(1, servers))
