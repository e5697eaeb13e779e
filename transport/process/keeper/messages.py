"""The messages of a keeper: with a master, and with the process of a worker that is a class.

Both are UNIX stream sockets; a message is a JSON map with a `kind` in a frame (`transport/frames.py`). What else it has stands
beside each kind. This file imports the standard library alone, since a keeper does; whatever comes from a worker is checked by
`checked`, which is the whole of what a worker may say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

from counterpoint.transport.frames import BadFrame, Framing

TYPE_CHECKING = False  # as type checkers know it; to import `typing` takes 5 ms
if TYPE_CHECKING:
    from typing import Any

MAX_MESSAGE = 4 * 2**20
"""Bytes of one message to a worker or from a master; a larger one is refused before it is read."""

MOST_SAID = 2**18
"""Bytes of one message of a worker: its keeper holds some of each kind until a master has them."""

LONGEST_TEXT = 4000
"""Characters that are kept of a text that a worker sends."""

CONTROL_FD = "CLUSTER_CONTROL_FD"
"""The variable of a worker's process that holds the number of its control socket."""

# --- master to keeper; all but HELLO from the master of the last HELLO alone ---
HELLO = "hello"
"""`epoch, lease_seconds`, and of the master that started the keeper `order`. Answered by FACTS, and by what no master has
acknowledged; after a higher epoch by REFUSED."""
LIFE = "life"
"""A sign of life, several times in a lease; answered by the same."""
ACKNOWLEDGE = "acknowledge"
"""`number`: every message of the worker up to this one is in the journal."""
SEND = "send"
"""`message`: passed on to the worker's process; a command is not disturbed, and START and FAILOVER are answered for it."""
KILL = "kill"
"""Kill the worker and everything below it."""
END = "end"
"""Kill, and end without waiting for the acknowledgement."""
# and STOP, below

# --- keeper to master ---
FACTS = "facts"
"""What `decisions.Keeping.facts` returns."""
REFUSED = "refused"
"""`epoch`: a master of that epoch is, or was, here. The connection ends."""
BEAT = "beat"
"""`alive, status, trouble, pid`: a heartbeat, or only news if not `alive`; not numbered."""
# and what the worker says, each with a `number`, and:
CREATED = "created"
"""`pid`: the process runs."""
CREATE_FAILED = "create_failed"
"""`reason`."""
EXITED = "exited"
"""`code, reason, lost`: the last message."""

# --- master, by the keeper, to a worker's process ---
DESCRIPTION = "description"
"""`description`: the first message."""
START = "start"
STOP = "stop"
"""Also to a keeper: ask the worker to end; a command by SIGTERM."""
CHECK_CHILDREN = "check_children"
"""`check, children`."""
FAILOVER = "failover"
"""`notice, failed`."""
MEMBERS = "members"
"""`members`."""

# --- worker's process to keeper ---
READY = "ready"
"""`address, server_key`."""
STARTED = "started"
FINISHED = "finished"
FAILED = "failed"
"""`reason`: a hook raised; the process ends next. Not passed on, but told with the end."""
ALIVE = "alive"
"""`status`: a heartbeat."""
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

SAID: Mapping[str, Mapping[str, type]] = {
    READY: {"address": str, "server_key": str},
    STARTED: {},
    FINISHED: {},
    FAILED: {"reason": str},
    ALIVE: {"status": str},
    CHILDREN_CHECKED: {"check": int},
    FAILOVER_DONE: {"notice": int},
    REPLACE: {"worker": str, "incarnation": int, "reason": str},
    SCALE: {"count": int},
    STOP_JOB: {"reason": str, "code": int},
    ENDING: {},
    EXTEND: {"seconds": float},
}
"""All that a worker may say, and the fields of each."""


class Messages:
    """How messages of one direction are written and read. All methods raise `BadFrame`."""

    def __init__(self, most: int) -> None:
        self._framing = Framing(most, ">")

    def frame(self, message: Mapping[str, Any]) -> bytes:
        """Returns a message as it is sent."""
        try:
            data = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise BadFrame(f"a message of kind {message.get('kind')!r} cannot be written: {error}") from None
        return self._framing.frame(data)

    def cut(self, received: bytearray) -> Iterator[dict[str, Any]]:
        """Removes the whole messages from the beginning of what was received; yields each."""
        return map(_read, self._framing.cut(received))


def _read(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadFrame(f"a message is no JSON: {error}") from None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise BadFrame("a message is not a map with a `kind`")
    return message


MESSAGES = Messages(MAX_MESSAGE)
"""Those of a master, to a master, and to a worker."""

WORDS = Messages(MOST_SAID)
"""Those of a worker."""


def checked(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns what a worker said with the fields of its kind alone, texts clipped; None if it makes no sense."""
    fields = SAID.get(message["kind"])
    if fields is None:
        return None
    found: dict[str, Any] = {"kind": message["kind"]}
    for name, kind in fields.items():
        value: Any = message.get(name)
        if isinstance(value, bool) or not isinstance(value, kind):
            return None
        if isinstance(value, str):
            value = value[:LONGEST_TEXT].encode(errors="backslashreplace").decode()
        elif isinstance(value, int | float) and not (math.isfinite(value) and abs(value) < 2**63):
            return None
        found[name] = value
    return found
