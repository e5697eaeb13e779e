"""Opens either end of the wire. Both ends compute the same from the same values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from counterpoint.transport.config import TransportConfig
from counterpoint.transport.messages import Hello
from counterpoint.transport.outages import Outages
from counterpoint.transport.validation import MAX_ARRAY_BYTES
from counterpoint.transport.wires.base import BatchReceiver
from counterpoint.transport.wires.endpoint import find_address, resolve_address, tell_address, watched_keys
from counterpoint.transport.wires.link import SharedConnection, TrainerLink
from counterpoint.transport.wires.listener_keys import listener_keys
from counterpoint.transport.wires.receiver import Receiver
from counterpoint.transport.wires.zmq_wire import ZmqConnection, ZmqListener


def open_connection(config: TransportConfig, output_dir: Path, outages: Outages | None = None) -> SharedConnection:
    """Returns a connection to the trainer of the job in `output_dir`, for the links of any number of runs.

    `outages` gets the trainer's. Raises `ValueError` for a bad configuration.
    """
    address = resolve_address(config, output_dir)
    find = partial(find_address, address, output_dir)
    connection = ZmqConnection(address, watched_keys(config), config.heartbeat_seconds, find)
    return SharedConnection(connection, outages)


def open_link(config: TransportConfig, output_dir: Path, outages: Outages | None = None) -> TrainerLink:
    """Returns the end of a run that has the connection for itself. It connects once started. Raises as `open_connection`."""
    return open_connection(config, output_dir, outages).link()


def open_receiver(
    config: TransportConfig, output_dir: Path, refusal: Callable[[Hello], str | None] = lambda hello: None
) -> BatchReceiver:
    """Returns the trainer's end for the job in `output_dir`, listening.

    `refusal` returns why a `Hello` must not take the place of its run's connection, None if it may.

    Raises `ValueError` for a bad configuration, `OSError` when another trainer listens already or the address cannot be
    used.
    """
    address = resolve_address(config, output_dir)
    listener = ZmqListener(
        address,
        listener_keys(config),
        config.heartbeat_seconds,
        min(config.largest_batch, MAX_ARRAY_BYTES),
        config.credit,
    )
    try:
        tell_address(address, output_dir)
    except OSError:
        listener.close(linger=0)
        raise
    return Receiver(listener, config.largest_batch, refusal)
