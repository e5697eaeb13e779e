"""The actor that stands for one worker on Ray: it runs the worker's agent as a child process, and nothing else.

The agent is the same process as on one machine, and so is the worker below it; neither torch nor vLLM is in the actor. The agent
runs below a guardian (`transport/process/launch.py`): whatever ends the actor kills the agent and all that is below it. The
actor ends with its agent. Ray never starts it again; the PrimeManager decides. `counterpoint/cluster/backends/ray_cluster.py`
creates it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from typing import Any

from counterpoint.cluster.agent.protocol import MARK
from counterpoint.cluster.agent.settings import MAX_ENDPOINT_BYTES, AgentEndpoint, AgentSettings
from counterpoint.cluster.backends.ray_places import node_name
from counterpoint.transport.process.child import last_lines
from counterpoint.transport.process.launch import COMMAND_NOT_STARTED, guarded

LAST_SECONDS = 120.0
"""How long the last actor of a bundle waits for the others before it leaves the placement group to its job's next start."""


class AgentActor:
    """Runs an agent. Its methods wait on Ray's event loop, so any number of masters may wait at once."""

    def __init__(self, name: str, settings: dict[str, Any]) -> None:
        """Starts the agent. `settings` are `AgentSettings` without what only the actor knows: its node, and where to listen."""
        import ray

        here = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        self._name = name
        self._me = here.current_actor
        self._group = ray.util.get_current_placement_group()
        self._settings = AgentSettings(
            **settings,
            node=node_name({"NodeManagerAddress": address, "NodeID": here.get_node_id()}),
            listen=f"tcp://{address}",
            announce=True,
        )
        self._listens: Future[AgentEndpoint] = _running()
        self._code: Future[int] = _running()
        # The kernel tells the guardian when the thread that started it has ended; so that thread waits for the guardian.
        threading.Thread(target=self._run, name="agent", daemon=True).start()

    async def endpoint(self) -> dict[str, Any]:
        """Waits until the agent listens; returns the fields of its `AgentEndpoint`. Raises `RuntimeError` if it ended before."""
        return (await asyncio.wrap_future(self._listens)).model_dump()

    async def ended(self) -> int:
        """Waits for the agent's end and returns its exit code."""
        return await asyncio.wrap_future(self._code)

    async def leave(self) -> None:
        """Ends the actor in order."""
        import ray

        ray.actor.exit_actor()

    def _run(self) -> None:
        code = COMMAND_NOT_STARTED
        try:
            with _start(self._settings) as process:
                assert process.stdout is not None
                line = process.stdout.readline(MAX_ENDPOINT_BYTES)
                if line:
                    self._listens.set_result(AgentEndpoint.model_validate_json(line))
                code = process.wait()
        except (OSError, ValueError) as error:
            self._listens.set_exception(RuntimeError(f"the agent cannot be started: {error}"))
        finally:
            if not self._listens.done():
                said = " | ".join(last_lines(self._settings.log_file, count=3)) or "nothing"
                self._listens.set_exception(
                    RuntimeError(
                        f"the agent ended with code {code} before it listened; its log {self._settings.log_file} on "
                        f"{self._settings.node} says: {said}"
                    )
                )
            self._code.set_result(code)
            if code == 0:
                self._remove_group()
            self._me.leave.remote()

    def _remove_group(self) -> None:
        """Removes the placement group if nothing else is in it: an agent that ended in order may have lost its master for good.

        Of several actors that end at the same time, the one with the first name waits for the others.
        """
        import ray

        deadline = time.monotonic() + LAST_SECONDS
        bundle = self._name.rsplit("/", 2)[0]
        while others := [
            name for name in ray.util.list_named_actors() if name.startswith(f"{bundle}/") and name != self._name
        ]:
            if min(others) < self._name or time.monotonic() > deadline:
                return
            time.sleep(0.2)
        ray.util.remove_placement_group(self._group)


def _start(settings: AgentSettings) -> subprocess.Popen[bytes]:
    """Starts an agent below a guardian."""
    settings.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    marking = ["env", f"{MARK}={settings.mark}"]  # not the guardian: an agent first kills all others with its mark
    with open(os.open(settings.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
        return subprocess.Popen(
            guarded(
                [*marking, sys.executable, "-P", "-m", "counterpoint.cluster.agent.main", settings.model_dump_json()]
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_own_environment(),
        )


def _own_environment() -> dict[str, str]:
    """The environment of this process without the number of threads that Ray sets for numerical libraries in an actor.

    It counts the cores that the actor reserved, often none; the worker decides by itself, as on one machine.
    """
    environment = dict(os.environ)
    with open("/proc/self/environ", "rb") as file:
        given = {entry.partition(b"=")[0] for entry in file.read().split(b"\0")}
    if b"OMP_NUM_THREADS" not in given:
        environment.pop("OMP_NUM_THREADS", None)
    return environment


def _running() -> Future[Any]:
    """A future that no waiter can cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
