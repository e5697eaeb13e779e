"""The certificate of `counterpoint serve`, which may be replaced while it serves: a connection gets the newest one."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from counterpoint.transport.files.watched import Watched


@dataclass(frozen=True, slots=True)
class _Pair:
    """A certificate and its key, with a context that has both."""

    content: tuple[bytes, ...]
    context: ssl.SSLContext = field(compare=False)


class Certificate:
    """A certificate and its key, PEM files, and the context that new connections take.

    A context that is in use is never changed: files that are replaced while they are read would leave it with a certificate and
    no key. Each connection is given the newest one instead.
    """

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """Raises `ValueError`, naming both files, unless they are a certificate and its key."""
        self._files = certificate, key
        self._watched = Watched(f"the certificate in {certificate.absolute()}", self._read)
        self.context = self._watched.value.context
        self.context.sni_callback = self._give

    def refresh(self) -> None:
        """Reads the files again. Blocks on the disk; what does not fit together is logged and changes nothing."""
        self._watched.refresh()

    def _give(self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        del name, context
        connection.context = self._watched.value.context

    def _read(self) -> _Pair:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            content = self._content()
            context.load_cert_chain(*self._files)
            if self._content() != content:
                raise OSError("they were replaced while they were read")
        except OSError as error:  # of a file or of its content
            certificate, key = self._files
            raise ValueError(
                f"tls_certificate = {str(certificate)!r}, tls_key = {str(key)!r}: {error}; expected PEM files of a "
                "certificate and of its key"
            ) from None
        return _Pair(content, context)

    def _content(self) -> tuple[bytes, ...]:
        return tuple(file.read_bytes() for file in self._files if file is not None)
