"""The messages between master and agent, and between agent and a worker's process of a class.

Master to agent: ZMQ, one msgpack map a message. A worker's process and its agent share a UNIX stream socket, inherited by the
number in `$CLUSTER_CONTROL_FD`; there each message is a 4-byte big-endian length and one msgpack map. No map is larger than
`MAX_MESSAGE` bytes. Every map has `kind`, one of the constants below; what else it has stands beside each.
`malformed` checks a master's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from counterpoint.transport.framed_maps import FramedMaps
from counterpoint.transport.frames import BadFrame, Framing
from counterpoint.transport.typed import typed
from counterpoint.transport.unpacked import shown

MAX_MESSAGE = 4 * 2**20
"""Bytes of one message; a larger one is refused before it is decoded."""

MESSAGES = FramedMaps(Framing(MAX_MESSAGE, ">"))
"""Packs and checks messages, and cuts a control socket's stream into them."""

CONTROL_FD = "CLUSTER_CONTROL_FD"
"""The variable of a worker's process that holds the number of its control socket."""

MARK = "CLUSTER_AGENT"
"""The variable by which every process of an agent is known: `<job's directory>:<node>`
(`counterpoint/cluster/agent/remains.py`)."""

# --- master to agent: all have `epoch`; all but HELLO and ACKNOWLEDGE have an `id`, with which DONE or REFUSED answers ---
HELLO = "hello"
"""`job, lease_seconds, received`: reports above that number are sent (again). Answered by WELCOME; after a higher epoch by
REFUSED without `id`. Repeated as a heartbeat."""
CREATE = "create"
"""The fields of `WorkerOrder`. A living process of an earlier incarnation is killed first."""
ORDER = "order"
"""`worker, incarnation, order`: passed on to the worker's process as it is (one of the agent-to-worker messages)."""
STOP = "stop"
"""`worker, incarnation`."""
KILL = "kill"
"""`worker, incarnation`."""
PUBLISH = "publish"
"""`members`: kept, and passed on to every worker's process, also to those that are created later."""
END = "end"
"""Kill every worker and end the agent."""
ACKNOWLEDGE = "acknowledge"
"""`number`: every report up to this one is in the journal."""

# --- agent to master ---
WELCOME = "welcome"
"""`agent` (its own id), `node`, `workers` (the fields of each `LivingWorker`), `reports` (the number of the last one that it
keeps), `ending`: why the agent ends, or empty. Also sent when it begins to end."""
DONE = "done"
"""`id`."""
REFUSED = "refused"
"""`id, reason, epoch`: the highest epoch that the agent has seen; above the master's own if that one is stale. A master is also
sent one, with the `id` 0, when another one takes its place."""
REPORT = "report"
"""`number, event` (the event's class name), `fields` (all but `at`): kept until acknowledged."""
BEAT = "beat"
"""`worker, incarnation, status, trouble, pid, alive`: a heartbeat, or only news if not `alive`; not numbered. A new master is
sent the news of every worker."""

# --- agent to worker's process ---
DESCRIPTION = "description"
"""`description`: that of the `WorkerOrder`; the first message."""
START = "start"
CHECK_CHILDREN = "check_children"
"""`check, children`."""
FAILOVER = "failover"
"""`notice, failed`."""
MEMBERS = "members"
"""`members`."""
# STOP, as above, without fields

# --- worker's process to agent ---
READY = "ready"
"""`address, server_key`."""
STARTED = "started"
FINISHED = "finished"
FAILED = "failed"
"""`reason`: a hook raised; the process ends next."""
ALIVE = "alive"
"""`status`: a heartbeat."""
NEWS = "news"
"""A command's process id, or what it says of itself, has changed. This is no sign of life: its guardian may have sent it."""
CHILDREN_CHECKED = "children_checked"
"""`check`."""
FAILOVER_DONE = "failover_done"
"""`notice`."""
REPLACE = "replace"
"""`worker, incarnation, reason`."""
SCALE = "scale"
"""`count`: a SubMaster wants so many workers in its role."""
STOP_JOB = "stop_job"
"""`reason, code`."""
ENDING = "ending"
"""The worker ends by itself; of a command: `STOPPING=1`."""
EXTEND = "extend"
"""`seconds`; of a command: `EXTEND_TIMEOUT_USEC`."""

_COMMANDS: Mapping[str, Mapping[str, type]] = {
    HELLO: {"job": str, "lease_seconds": float, "received": int},
    CREATE: {"id": int},
    ORDER: {"id": int, "worker": str, "incarnation": int, "order": dict},
    STOP: {"id": int, "worker": str, "incarnation": int},
    KILL: {"id": int, "worker": str, "incarnation": int},
    PUBLISH: {"id": int, "members": list},
    END: {"id": int},
    ACKNOWLEDGE: {"number": int},
}
"""What each message of a master must have, beside `epoch`."""
_TYPES = {kind: msgspec.defstruct(kind, [("epoch", int), *fields.items()]) for kind, fields in _COMMANDS.items()}


def malformed(message: Mapping[str, Any]) -> str:
    """Returns what is wrong with a message of a master; empty if nothing."""
    if (kind := message["kind"]) not in _TYPES:
        return f"there is no message of kind {shown(kind)}"
    try:
        typed(message, _TYPES[kind], kind, BadFrame)
    except BadFrame as error:
        return str(error)
    return ""
