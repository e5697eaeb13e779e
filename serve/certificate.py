"""The certificate of `counterpoint serve`, which may be replaced while it serves: a connection gets the newest one."""

from __future__ import annotations

import ssl
from pathlib import Path

from transport.files.watched import Watched


class Certificate:
    """A certificate and its key, PEM files, and the context that new connections take."""

    def __init__(self, certificate: Path, key: Path | None) -> None:
        """Raises `ValueError`, naming both files, unless they are a certificate and its key."""
        self._files = certificate, key
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._watched = Watched(f"the certificate in {certificate.absolute()}", self._read)
        self.context.load_cert_chain(*self._files)

    def refresh(self) -> None:
        """Reads the files again. Blocks on the disk; what does not fit together is logged and changes nothing."""
        if self._watched.refresh():
            self.context.load_cert_chain(*self._files)

    def _read(self) -> tuple[bytes, ...]:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._files)
            return tuple(file.read_bytes() for file in self._files if file is not None)
        except OSError as error:  # of a file or of its content
            certificate, key = self._files
            raise ValueError(
                f"tls_certificate = {str(certificate)!r}, tls_key = {str(key)!r}: {error}; expected PEM files of a "
                "certificate and of its key"
            ) from None
