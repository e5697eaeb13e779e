"""The address of a job's ZMQ socket, and the CURVE keys of one end.

Both ends compute the same address from the same configuration. An address that other machines can reach needs keys.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import zmq
import zmq.auth
from zmq.utils import z85

from counterpoint.transport.config import TransportConfig
from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import read_bytes
from counterpoint.transport.files.watched import Watched
from counterpoint.transport.loopback import WILDCARD_HOSTS, host_in_url, is_loopback
from counterpoint.transport.process.launch import SHARED_TMPDIR

SOCKET_NAME = "transport.sock"

IPC = "ipc://"

NODE_ADDRESS = "CLUSTER_ADDRESS"
"""The variable in which an actor on Ray tells its worker where other nodes reach theirs."""

TOLD = "transport.address"
"""A file in the job's directory: where a trainer is reached that listens on every address of its node."""

_MOST_TOLD_BYTES = 1024

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9_.-]*|\*):(?P<port>\d{1,5})")

_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True, slots=True, repr=False)
class CurveKeys:
    """CURVE keys, Z85. Without a representation, so that they are never shown."""

    server_public: bytes
    public: bytes
    secret: bytes


def resolve_address(config: TransportConfig, output_dir: Path) -> str:
    """Returns the ZMQ address of the job in `output_dir`.

    Raises `ValueError` when the configured one is malformed, too long for a UNIX socket, or reachable from other machines
    without keys; `PermissionError` when the fallback directory is another user's.
    """
    if config.address is None:
        return IPC + str(socket_path(output_dir.resolve(), SOCKET_NAME))
    if config.address.startswith(IPC):
        path = config.address.removeprefix(IPC)
        if not path or path.startswith("@") or len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
            raise ValueError(
                f"transport.address: {config.address!r} has a path of {len(os.fsencode(path))} bytes; a UNIX socket takes 1 to "
                f"{zmq.IPC_PATH_MAX_LEN}, without a leading '@'"
            )
        return config.address
    match = _TCP.fullmatch(config.address)
    if match is None or not 0 < int(match["port"]) < 2**16:
        raise ValueError(f"transport.address: {config.address!r} is neither ipc://PATH nor tcp://HOST:PORT")
    if config.secret_key_file is None and not is_loopback(match["host"].strip("[]")):
        raise ValueError(
            f"transport.address: {config.address!r} is reachable from other machines and needs CURVE keys: set "
            "server_public_key_file and secret_key_file (`counterpoint keys` makes them), or use ipc:// or tcp://127.0.0.1"
        )
    return config.address


def is_everywhere(address: str | None) -> bool:
    """Whether what listens there is reached by every address of its machine, so that peers have to be told one."""
    return _wildcard_in(address or "") is not None


def tell_address(address: str, output_dir: Path) -> None:
    """Writes where this process, which listens on `address`, is reached, if `address` does not say it. Raises `OSError`."""
    if (host := _wildcard_in(address)) is not None:
        host = os.environ.get(NODE_ADDRESS) or host
        output_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(output_dir / TOLD, f"tcp://{host_in_url(host)}:{address.rpartition(':')[2]}".encode())


def find_address(address: str, output_dir: Path) -> str:
    """Returns where the end that listens on `address` is reached: as it told last, before that on this machine."""
    if (host := _wildcard_in(address)) is None:
        return address
    with suppress(OSError, ValueError):
        match = _TCP.fullmatch(told := read_bytes(output_dir / TOLD, _MOST_TOLD_BYTES).decode("ascii"))
        if match is not None and match["host"] != "*":  # one can listen there, but not connect to it
            return told
    return f"tcp://{host_in_url(host)}:{address.rpartition(':')[2]}"


def _wildcard_in(address: str) -> str | None:
    match = _TCP.fullmatch(address)
    host = "" if match is None else match["host"].strip("[]").replace("*", "0.0.0.0")
    return host if host in WILDCARD_HOSTS else None


def load_keys(config: TransportConfig) -> CurveKeys | None:
    """Returns this end's keys, or None without any. Raises `ValueError` naming the field that is missing or no certificate's."""
    if config.server_public_key_file is None and config.secret_key_file is None:
        return None
    if config.server_public_key_file is None or config.secret_key_file is None:
        raise ValueError(
            "transport.server_public_key_file and transport.secret_key_file come together; only one is set"
        )
    server_public = _load("server_public_key_file", load_public, config.server_public_key_file)
    return CurveKeys(server_public, *_load("secret_key_file", load_pair, config.secret_key_file))


def load_public(path: Path) -> bytes:
    """Returns the public key in a certificate, Z85. Raises `OSError`; `ValueError` naming the file if it holds none."""
    public: bytes = zmq.auth.load_certificate(path)[0]
    try:
        if len(z85.decode(public)) == 32:
            return public
    except (ValueError, LookupError):
        pass
    raise ValueError(f"{path.absolute()} holds no public key (40 characters of Z85)")


def load_pair(path: Path) -> tuple[bytes, bytes]:
    """Returns the public and the secret key of a secret certificate, Z85.

    The public one is computed from the secret. Raises `OSError`; `ValueError` naming the file if it holds no secret key.
    """
    secret = zmq.auth.load_certificate(path)[1] or b""
    try:
        return zmq.curve_public(secret), secret
    except (ValueError, zmq.ZMQError):
        raise ValueError(
            f"{path.absolute()} holds no secret key (40 characters of Z85); expected a *.key_secret file"
        ) from None


def watched_keys(config: TransportConfig) -> Watched[CurveKeys] | None:
    """Returns an end's keys, to be read again once they change, or None without any. Raises as `load_keys`."""
    if config.server_public_key_file is None and config.secret_key_file is None:
        return None

    def read() -> CurveKeys:
        keys = load_keys(config)
        assert keys is not None, "the files are set"
        return keys

    return Watched("the keys of transport", read)


def load_authorized_keys(config: TransportConfig, keys: CurveKeys, *, may_be_empty: bool = False) -> frozenset[bytes]:
    """Returns the public keys that may connect to the end that listens, whose own are `keys`.

    Raises `ValueError` when there are none and `may_be_empty` is not set, or when this end's public key is not the one that its
    peers expect.
    """
    if keys.public != keys.server_public:
        raise ValueError(
            f"transport: {config.secret_key_file} is not the secret of {config.server_public_key_file}; at the end that "
            "listens the two are one pair"
        )
    if config.authorized_keys_directory is None:
        raise ValueError(
            "transport.authorized_keys_directory: the end that listens needs one when it has keys, to know its peers"
        )
    directory = config.authorized_keys_directory
    keys_by_name: dict[bytes, bool] = _load("authorized_keys_directory", zmq.auth.load_certificates, directory)
    if not keys_by_name and not may_be_empty:
        raise ValueError(f"transport.authorized_keys_directory: {directory.absolute()} holds no public key (*.key)")
    return frozenset(keys_by_name)


def socket_path(directory: Path, name: str) -> Path:
    """Returns the path of the UNIX socket `name` of the job in `directory`, which is absolute.

    A path that would be too long for a socket is replaced by one in the temporary directory. Raises `PermissionError` when the
    directory for those is another user's.
    """
    path = directory / name
    if len(os.fsencode(path)) <= zmq.IPC_PATH_MAX_LEN:
        return path
    private = Path(os.environ.get(SHARED_TMPDIR) or tempfile.gettempdir()) / f"counterpoint-{os.getuid()}"
    private.mkdir(mode=0o700, exist_ok=True)
    found = private.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{private} must be a directory of this user with mode 0700; remove it or set transport.address"
        )
    named = directory if name == SOCKET_NAME else path
    return private / f"{hashlib.sha256(os.fsencode(named)).hexdigest()[:32]}.sock"


def _load(field: str, load: Callable[[Path], _Loaded], path: Path) -> _Loaded:
    try:
        return load(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"transport.{field}: {path.absolute()} cannot be read as a CURVE certificate: {error}"
        ) from error
