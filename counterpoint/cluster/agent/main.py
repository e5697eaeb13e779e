"""Starts an agent: `python -m counterpoint.cluster.agent.main SETTINGS`, with `AgentSettings` as JSON.

`starting.py` is the other end. It takes the lock of its name, ends what an earlier agent of that name left, binds its socket,
and announces its endpoint. Its exit code is 0 after an end in order, 75 if another agent of that name lives.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from counterpoint.cluster.agent.agent import Agent
from counterpoint.cluster.agent.protocol import MARK, MAX_MESSAGE
from counterpoint.cluster.agent.remains import kill_marked, start_of
from counterpoint.cluster.agent.settings import AgentEndpoint, AgentSettings, lock_file, read_endpoint
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.files.own_directory import remove_left
from counterpoint.transport.loopback import is_loopback
from counterpoint.transport.process.launch import SHARED_TMPDIR, TEMPORARY, die_with_parent
from counterpoint.transport.wires.endpoint import IPC, NODE_ADDRESS, socket_path

logger = logging.getLogger(__name__)

ANOTHER_LIVES = 75
"""Exit code when another agent of that name holds its lock."""


@contextmanager
def _bound(settings: AgentSettings) -> Iterator[tuple[zmq.asyncio.Socket, AgentEndpoint]]:
    """Yields the agent's socket and what is to be announced."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE)
    router.setsockopt(zmq.SNDHWM, 0)  # what waits is bounded by the reports that are kept; a report must not get lost
    router.setsockopt(zmq.LINGER, 1000)
    authenticator, path, server_key = None, None, ""
    try:
        if settings.master_key:
            authenticator = ThreadAuthenticator(context)
            authenticator.start()
            authenticator.certs["*"] = {settings.master_key.encode(): True}
            public, secret = zmq.curve_keypair()
            router.curve_server, router.curve_publickey, router.curve_secretkey = True, public, secret
            server_key = public.decode()
        if settings.listen == "ipc":
            path = socket_path(settings.directory.resolve(), f"{settings.name}.{settings.agent}.sock")
            router.bind(f"{IPC}{path}")
            path.chmod(0o600)
            address = f"{IPC}{path}"
        else:
            host = os.environ[NODE_ADDRESS] = settings.listen.removeprefix("tcp://")
            if not settings.master_key and not is_loopback(host):
                raise ValueError(
                    f"an agent that listens on {settings.listen} is reachable from other machines and needs master_key"
                )
            address = f"tcp://{host}:{router.bind_to_random_port(f'tcp://{host}')}"
        started = start_of(os.getpid()) or 0.0
        yield (
            router,
            AgentEndpoint(
                agent=settings.agent,
                node=settings.node,
                pid=os.getpid(),
                started=started,
                address=address,
                server_key=server_key,
            ),
        )
    finally:
        router.close()
        if authenticator is not None:
            authenticator.stop()
        context.term()
        if path is not None:
            path.unlink(missing_ok=True)


def _remove_earlier_socket(settings: AgentSettings) -> None:
    """Removes the socket of an agent that was killed."""
    earlier = read_endpoint(settings.directory, settings.name)
    if earlier is not None and earlier.address.startswith(IPC):
        path = Path(earlier.address.removeprefix(IPC))
        if path.suffix == ".sock":
            path.unlink(missing_ok=True)


def run_agent(settings: AgentSettings) -> int:
    """Runs an agent to its end; returns the exit code."""
    settings.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        lock = take_lock(lock_file(settings.directory, settings.name), f"another agent {settings.name} lives")
    except OSError as error:
        logger.error("cannot start: %s", error)
        return ANOTHER_LIVES
    try:
        if left := kill_marked(settings.mark):
            logger.error("processes of an earlier agent %s cannot be killed: %s", settings.name, left)
            return 1
        _remove_earlier_socket(settings)
        with _bound(settings) as (router, endpoint):
            write_atomically(settings.endpoint_file, endpoint.model_dump_json().encode(), durable=False)
            if settings.announce:
                print(endpoint.model_dump_json(), flush=True)  # noqa: T201 - for its starter
            logger.info("agent %s of node %s takes commands at %s", settings.agent, settings.node, endpoint.address)
            asyncio.run(Agent(settings, router).run())
            settings.endpoint_file.unlink(missing_ok=True)
    finally:
        os.close(lock)
    return 0


def main() -> None:
    """Runs the agent that the command line describes."""
    settings = AgentSettings.model_validate_json(sys.argv[1])
    if settings.parent:
        die_with_parent(signal.SIGTERM, settings.parent)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # its starter's terminal is none of its concern
    os.environ[MARK] = settings.mark
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Guardians that were killed leave them.
    remove_left(Path(os.environ.get(SHARED_TMPDIR) or tempfile.gettempdir()), TEMPORARY)
    sys.exit(run_agent(settings))


if __name__ == "__main__":
    main()
