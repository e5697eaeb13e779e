"""The server that `counterpoint eval` or `env check` starts, below a guardian: it ends with this process however that ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.inference.base import InferenceError
from counterpoint.inference.config import InferenceConfig, LoraServingConfig, PoolConfig, check_url
from counterpoint.inference.pool.sources import parse_listing, read_text
from counterpoint.inference.port_claim import check_free
from counterpoint.inference.root_cause import root_cause
from counterpoint.inference.server import check_configuration
from counterpoint.job.check import SAFE_PATH
from counterpoint.job.configuration.layers import without_configuration
from counterpoint.job.configuration.load import to_toml
from counterpoint.job.evaluation.subject import EvaluatedCheckpoint
from counterpoint.orchestrator.evaluation.alone import Subject
from counterpoint.run.config import RunConfig
from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.loopback import host_in_url
from counterpoint.transport.process.child import Child

LOG = "inference.log"

_STOP_SECONDS = 30.0

NAMED_SERVER_SECONDS = 30.0
"""How long a server that a person named, and said to run, may take to be reached, unless the file says otherwise."""

Result = TypeVar("Result")


def server_of(
    given: InferenceConfig, checkpoint: EvaluatedCheckpoint | None, subject: Subject, directory: Path
) -> InferenceConfig:
    """Returns the configuration of the server to start, on a port that is free now. Raises `UserError`."""
    changes: dict[str, Any] = {"log_file": (directory / LOG).absolute(), "port": free_port(given.host, given.port)}
    changes["identity_file"] = None
    if checkpoint is None or checkpoint.rank is None:
        changes |= {"lora": None} | ({} if checkpoint is None else {"model": str(checkpoint.directory)})
    else:
        lora = given.lora or LoraServingConfig()
        changes["lora"] = lora.model_copy(update={"max_rank": max(lora.max_rank, checkpoint.rank)})
        if subject.update is None:
            named = json.dumps({"name": subject.name, "path": str(checkpoint.directory)})
            changes["extra_args"] = [*given.extra_args, "--lora-modules", named]
    config = given.model_copy(update=changes)
    try:
        check_configuration(config)
    except ValueError as error:
        raise UserError(str(error)) from None
    return config


def _known_servers(pool: PoolConfig) -> set[str]:
    """Returns the addresses that the configuration names, also in its file of addresses, if there is one."""
    if pool.urls_file is None:
        return {*pool.urls}
    try:
        listed, _ = parse_listing(read_text(pool.urls_file).decode())
    except (OSError, ValueError):  # the job may never have run
        return {*pool.urls}
    return {*pool.urls, *listed}


def at_servers(run: RunConfig, urls: list[str], server: InferenceConfig | None = None) -> RunConfig:
    """Returns the run with these servers alone; `server` is the configuration of one that is started. Raises `UserError`."""
    changes: dict[str, Any] = {"urls": urls, "dns": None, "urls_file": None}
    own = run.inference.identity_file
    if own is not None and not (own.exists() and {*urls} <= _known_servers(run.inference)):
        changes["identity_file"] = None  # they are not those of the job that the file describes, or it never ran
    if server is not None:
        # It may have the port of the job's servers, but not their identity.
        changes |= {"protocol": "binary", "api_key_file": server.api_key_file, "identity_file": server.identity_file}
        changes["startup_timeout_seconds"] = server.startup_timeout_seconds
    elif "startup_timeout_seconds" not in run.inference.model_fields_set:
        changes["startup_timeout_seconds"] = NAMED_SERVER_SECONDS
    try:
        changes["urls"] = [check_url(url) for url in urls]
        pool = PoolConfig.model_validate(run.inference.model_dump() | changes)
    except ValueError as error:
        raise UserError(f"--server {', '.join(urls)}: {error}") from None
    return run.model_copy(update={"inference": pool})


def url_of(server: InferenceConfig) -> str:
    """Returns the URL of a started server, seen from this machine."""
    return f"{server.scheme}://{host_in_url(server.host)}:{server.port}"


@asynccontextmanager
async def server_running(
    config: InferenceConfig, directory: Path, environment: Mapping[str, str]
) -> AsyncIterator[asyncio.Task[int]]:
    """Starts the server for the duration of the block; yields a task that ends, with its exit code, when the server does.

    It may not listen yet.
    """
    file = directory / "inference.toml"
    write_atomically(file, to_toml(config).encode())
    command = [sys.executable, "-P", "-m", "counterpoint.cli.main", "inference", str(file)]
    variables = {**without_configuration(os.environ), **SAFE_PATH, **environment}
    server = Child("the inference server", command, environment=variables)
    ended = asyncio.create_task(server.ended(), name="inference server")
    try:
        yield ended
    finally:
        await server.stopped(_STOP_SECONDS)


async def unless_ended(work: Awaitable[Result], server: asyncio.Future[int], explain: Callable[[], str]) -> Result:
    """Awaits `work`, and raises `InferenceError` as soon as the server ends; `explain` returns what to say of its log."""
    task = asyncio.ensure_future(work)
    both: set[asyncio.Future[Any]] = {task, server}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        raise InferenceError(f"the inference server ended with exit code {server.result()}{explain()}")
    finally:
        task.cancel()
        await asyncio.wait({task})


def cause_in(log_file: Path) -> str:
    """Returns why a server ended, and where its log is, to append to a message."""
    cause = f": {found}" if (found := root_cause(log_file)) else ""
    return f"{cause}; its log is {log_file}"


def free_port(host: str, port: int) -> int:
    """Returns `port`, or another if it is in use, as by a job that runs."""
    if port:
        with contextlib.suppress(OSError):
            check_free(host, port)
            return port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            raise UserError(f"inference.host = {host!r}: no port of it is free") from None
        return int(probe.getsockname()[1])
