"""Both ends of the calls of one worker's process: those to its own methods, and those that it makes.

On one machine they go over a socket in the job's directory. Where the keeper listens for other machines, the process makes a pair
of CURVE keys for itself. The public one travels with its address, so exactly the members of the job can call each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import zmq

from counterpoint.cluster.calls.caller import Caller
from counterpoint.cluster.calls.group import RoleGroup
from counterpoint.cluster.calls.remote import methods_of
from counterpoint.cluster.calls.server import CallServer, call_address
from counterpoint.cluster.member import Member
from counterpoint.cluster.worker_process.description import Description
from counterpoint.transport.wires.endpoint import CurveKeys

_END_SECONDS = 0.2
"""How long the end of the process waits for a method that runs. The keeper is not to be kept waiting."""


class WorkerCalls:
    """The calls of one process; `close` it at the end."""

    def __init__(self, description: Description) -> None:
        self._description = description
        self._keys = None if description.listen == "ipc" else _new_keys()
        self._caller = Caller(self._keys)
        self._server: CallServer | None = None
        self._members: tuple[Member, ...] = ()

    @property
    def public_key(self) -> str:
        """The CURVE public key of its address, Z85; empty without keys."""
        return "" if self._keys is None else self._keys.public.decode()

    def listen(self, worker: object) -> str:
        """Begins to answer calls to `worker`; returns the address, or nothing for one without methods to be called.

        Raises `OSError` when it cannot listen.
        """
        if not methods_of(type(worker)):
            return ""
        own = self._description
        address = call_address(Path(own.directory), own.worker) if own.listen == "ipc" else f"{own.listen}:*"
        server = CallServer(worker, own.worker, own.incarnation, address, self._keys)
        server.start()
        self._server = server  # from now on news of members, in another thread, reaches it
        self._authorize()
        return server.address

    def group(self, role: str) -> RoleGroup:
        """Returns the workers of a role, to be called."""
        return RoleGroup(role, self._caller)

    def update(self, members: Iterable[Member]) -> None:
        """Takes all members of the job, as last known."""
        self._members = tuple(members)
        self._caller.update(self._members)
        self._authorize()

    def close(self) -> None:
        """Ends both; what is in flight fails."""
        self._caller.close()
        if self._server is not None:
            self._server.close(_END_SECONDS)

    def _authorize(self) -> None:
        if self._server is not None:
            self._server.authorize([member.server_key.encode() for member in self._members if member.server_key])


def _new_keys() -> CurveKeys:
    public, secret = zmq.curve_keypair()
    return CurveKeys(public, public, secret)
