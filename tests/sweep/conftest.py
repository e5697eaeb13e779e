"""A root of every kind of storage, each served for real, and empty at the start of each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from counterpoint.sweep.stores.gs import GoogleStore
from perf.chaos.s3_server import point_at, s3_application, serving
from tests.sweep.gcs_server import Bucket, google_server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_bucket() -> Iterator[str]:
    """`s3://bucket`, at moto's."""
    with pytest.MonkeyPatch.context() as patch, serving(s3_application()) as address:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_CONFIG_FILE"):
            patch.delenv(name, raising=False)
        point_at(address)
        boto3.client("s3").create_bucket(Bucket="bucket")
        yield "s3://bucket"


@pytest.fixture(scope="session")
def google_bucket() -> Iterator[str]:
    """`gs://bucket`, at our own server."""
    with pytest.MonkeyPatch.context() as patch, google_server(Bucket()) as address:
        patch.setenv("STORAGE_EMULATOR_HOST", address)
        patch.setattr(GoogleStore, "write_interval", 0.0)  # which ours does not ask for
        yield "gs://bucket"


@pytest.fixture(params=["memory", "local", "s3", "gs"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A root that nobody has used."""
    match request.param:
        case "memory":
            return f"memory://test-{next(_numbers)}"
        case "local":
            return (tmp_path / "sweep").as_uri()
        case "s3":
            return f"{request.getfixturevalue('s3_bucket')}/test-{next(_numbers)}"
    return f"{request.getfixturevalue('google_bucket')}/test-{next(_numbers)}"
