"""The program at the sender: `python -m inference.remote_memory.source DESCRIPTOR ...` lets open files in memory be read.

It prints `{"agent": base64, "addresses": [of each file]}`, and ends when its standard input does. Readers that know the agent's
metadata may read until then. Over RDMA the network adapter answers them, over TCP this process does.
"""

from __future__ import annotations

import base64
import os
import select
import sys
from typing import Any

import orjson

from inference.remote_memory.agent import MappedFile, begin, open_agent

LOOK_SECONDS = 0.001
"""Between looks at what readers ask for."""


def main() -> None:
    """Runs to the end."""
    answers = begin()
    agent = open_agent()
    mapped = [_map(agent, int(descriptor)) for descriptor in sys.argv[1:]]
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    addresses = [each.address if each is not None else 0 for each in mapped]
    answers.write(orjson.dumps({"agent": metadata, "addresses": addresses}).decode() + "\n")
    answers.flush()
    while not select.select([0], [], [], LOOK_SECONDS)[0]:
        agent.get_new_notifs()  # answers what has come over TCP
    os._exit(0)  # past NIXL's own end, which waits for its peers


def _map(agent: Any, descriptor: int) -> MappedFile | None:
    """Maps a file for reading alone, unless the network adapter's driver takes only memory that it could write."""
    nbytes = os.fstat(descriptor).st_size
    if not nbytes:
        return None
    try:
        return MappedFile(agent, descriptor, nbytes, writable=False)
    except Exception as error:  # noqa: BLE001 - NIXL raises errors of many classes, with RuntimeError as their only common one
        sys.stderr.write(f"memory that can only be read was not registered ({error!r}); it is registered as writable\n")
    writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    try:
        return MappedFile(agent, writable, nbytes, writable=True)
    finally:
        os.close(writable)


if __name__ == "__main__":
    main()
