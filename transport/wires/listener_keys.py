"""The CURVE keys of an end that listens: its own pair, and the keys of those that may connect, read again once they change.

pyzmq's authenticator asks for each new connection, in its own thread (`callback`). An owner that can cut connections compares
`value` with what it listens with.
"""

from __future__ import annotations

from dataclasses import dataclass

from counterpoint.transport.config import TransportConfig
from counterpoint.transport.files.watched import Watched
from counterpoint.transport.wires.endpoint import CurveKeys, load_authorized_keys, load_keys


@dataclass(frozen=True, slots=True)
class ListenerKeys:
    """What was read last."""

    own: CurveKeys
    authorized: frozenset[bytes]
    """Public keys of those that may connect."""

    def admits_all_of(self, former: ListenerKeys) -> bool:
        """Whether whoever was connected under `former` may stay."""
        return self.own == former.own and self.authorized >= former.authorized


class WatchedListenerKeys(Watched[ListenerKeys]):
    """The keys that a configuration names. Without any key file use None instead."""

    def __init__(self, config: TransportConfig) -> None:
        """Raises `ValueError` as `load_keys` and `load_authorized_keys`."""
        self._has_read = False

        def read() -> ListenerKeys:
            own = load_keys(config)
            if own is None:
                raise ValueError("transport: server_public_key_file and secret_key_file are not set")
            # Later the directory may be empty: its last key was removed.
            authorized = load_authorized_keys(config, own, may_be_empty=self._has_read)
            self._has_read = True
            return ListenerKeys(own, authorized)

        super().__init__("the keys of transport", read)

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns whether the public key `key`, in Z85, may connect now. The name is pyzmq's."""
        self.refresh()
        return key in self.value.authorized


def listener_keys(config: TransportConfig) -> WatchedListenerKeys | None:
    """Returns the keys that `config` names, or None if it names none. Raises `ValueError` for what is missing or wrong."""
    if config.server_public_key_file is None and config.secret_key_file is None:
        return None
    return WatchedListenerKeys(config)
