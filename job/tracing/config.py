"""`[tracing]` of a job's file: a collector of OpenTelemetry that gets the job's traces."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from counterpoint.transport.config import Config


class TracingConfig(Config):
    """Traces for a collector (extra `otel`), by OTLP over HTTP."""

    endpoint: str
    """The collector's address for traces: `http://127.0.0.1:4318/v1/traces`."""

    headers_file: Path | None = None
    """A file with a header for the collector a line, `Authorization: Bearer ...`, readable by its owner alone."""

    rollouts: float = Field(default=0.01, ge=0, le=1)
    """Share of the rollouts that are traced; every step is. `trace_rollouts` of a run overrides it."""

    @field_validator("endpoint")
    @classmethod
    def _is_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("expected an address such as http://127.0.0.1:4318/v1/traces")
        if parts.username is not None or parts.password is not None:
            raise ValueError("an address must not hold a password; put it into headers_file")
        return value
