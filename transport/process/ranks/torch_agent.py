"""torch's elastic agent, the child of `node.RanksProcess`.

Its command is `python -m counterpoint.transport.process.ranks.torch_agent [LISTENER]`. It joins torch's c10d rendezvous,
starts this node's ranks with torchrun's variables, and monitors them. It never starts ranks again: a round has fixed members, and
whoever began it decides what follows a failure. The rendezvous's store also serves the ranks, at an address that is bound before
(`node.listen`).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

from counterpoint.transport.printable import clipped
from counterpoint.transport.process.imports import without_gc
from counterpoint.transport.process.notify import notify
from counterpoint.transport.process.ranks.node import NODE_RANK, RANKS_FAILURE, RanksOrder

with without_gc():
    import torch.distributed as dist
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

MONITOR_SECONDS = 0.1
"""How often the agent looks at its ranks."""

LONGEST_REASON = 2000
"""Characters of a failure's reason."""

SAY_SECONDS = 10.0
"""How long the parent may not keep up."""


class StoreRendezvous:
    """torch's rendezvous handler, whose own store serves the ranks as well.

    By itself the handler would start a second store for them, which would listen on every interface.
    """

    use_agent_store = True

    def __init__(self, handler: Any, order: RanksOrder) -> None:
        self._handler = handler
        self._order = order

    def next_rendezvous(self) -> Any:
        """Waits for all nodes."""
        info = self._handler.next_rendezvous()
        say(NODE_RANK, info.rank)
        address = RendezvousStoreInfo(self._order.host, self._order.port)
        return RendezvousInfo(info.store, info.rank, info.world_size, address)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


def say(name: str, value: object) -> None:
    """Tells the parent, who may not keep up for a moment, or have died."""
    text = f"{name}={clipped(' '.join(str(value).split()), LONGEST_REASON)}"
    deadline = time.monotonic() + SAY_SECONDS
    while not notify(text) and time.monotonic() < deadline:
        time.sleep(MONITOR_SECONDS)


def first_failure(failures: dict[int, Any]) -> str:
    """Says which rank failed first, and how. The agent itself ends the others by SIGTERM.

    Of those that it found in the same second a killed one comes first: the others have lost it.
    """
    rank, failure = min(
        failures.items(),
        key=lambda item: (item[1].exitcode == -signal.SIGTERM, item[1].timestamp, item[1].exitcode >= 0, item[0]),
    )
    code = failure.exitcode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    data = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    text = data["message"] if isinstance(data, dict) else data
    return f"rank {rank} {how}" + (f": {text}" if text and text != "<NONE>" else "")


def make_agent(order: RanksOrder, listener: int | None) -> LocalElasticAgent:
    """Returns the agent; the node with the listener has the store."""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the handler is to start no second store
    store = dist.TCPStore(
        order.host,
        order.port,
        is_master=listener is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=order.join_seconds),
        **({} if listener is None else {"master_listen_fd": listener}),
    )
    handler = DynamicRendezvousHandler.from_backend(
        order.run_id,
        store,
        C10dRendezvousBackend(store, order.run_id),
        min_nodes=order.nodes,
        max_nodes=order.nodes,
        local_addr=order.host,
        timeout=RendezvousTimeout(join=timedelta(seconds=order.join_seconds)),
    )
    spec = WorkerSpec(
        role="ranks",
        local_world_size=order.local_ranks,
        rdzv_handler=StoreRendezvous(handler, order),
        entrypoint=order.command[0],
        args=order.command[1:],
        max_restarts=0,
        monitor_interval=MONITOR_SECONDS,
        local_addr=order.host,
    )
    return LocalElasticAgent(
        spec,
        DefaultLogsSpecs(log_dir=order.directory),
        exit_barrier_timeout=order.exit_seconds,
        shutdown_timeout=int(order.stop_seconds),
    )


def main(listener: int | None) -> int:
    """Runs the ranks until all nodes' have succeeded, or one of this node's failed; returns the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    order = RanksOrder(**json.loads(sys.stdin.buffer.read()))
    if listener is not None:
        os.set_inheritable(listener, False)  # not for the ranks
    os.environ.update(order.environment)
    if order.local_ranks > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    try:
        result = make_agent(order, listener).run()
    except SignalException as error:
        say(RANKS_FAILURE, f"ended by {signal.Signals(error.sigval).name}")
        return 128 + int(error.sigval)
    except (RendezvousConnectionError, dist.DistError) as error:
        say(RANKS_FAILURE, f"the store of {order.run_id} at {order.host}:{order.port} does not answer: {error}")
        return 1
    if result.is_failed():
        say(RANKS_FAILURE, first_failure(result.failures))
        return 1
    return 0


if __name__ == "__main__":
    exit_code = main(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # torch's own teardown takes long on a busy machine, and there is nothing to keep
