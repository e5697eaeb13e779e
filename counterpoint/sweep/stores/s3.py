"""Objects of an S3 bucket, written with `If-None-Match: *` and `If-Match: <etag>`.

Amazon supports both since 2024; not every S3-compatible store does. Needs the extra `s3`. boto3 finds credentials, region
and endpoint by itself (`AWS_ENDPOINT_URL` for another store than Amazon's). An ETag may be a hash of the content; no two
records of a target are alike, so it names one write all the same.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

from counterpoint.sweep.store import LARGEST_OBJECT_BYTES, Conflict, Stored, StoreError, StoreUnavailable

SUFFIX = ".json"
CONNECT_SECONDS, READ_SECONDS = 5, 10

_REFUSED = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412", "409"})
_ABSENT = frozenset({"NoSuchKey", "404"})
_PASSING = frozenset({"RequestTimeout"})
"""This error has status 400, and says that the connection was idle for too long."""


class S3Store:
    """A bucket's objects below a prefix."""

    readers = 32
    write_interval = 0.0

    def __init__(self, bucket: str, prefix: str) -> None:
        """Raises `ImportError` naming the extra, `ValueError` without a bucket, `StoreError` for an unknown profile."""
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import (
                BotoCoreError,
                ClientError,
                FlexibleChecksumError,
                HTTPClientError,
                IncompleteReadError,
            )
            from botocore.exceptions import ConnectionError as NoConnection
            from botocore.parsers import ResponseParserError
            from urllib3.exceptions import HTTPError as CutOff
        except ImportError as error:
            raise ImportError("a sweep on s3:// needs boto3: install counterpoint[s3]") from error
        if not bucket:
            raise ValueError("s3:// without a bucket; write s3://bucket/prefix")
        self.root = f"s3://{bucket}/{prefix}"
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._errors = (BotoCoreError, ClientError, ResponseParserError, CutOff)  # the latter from the body of an error
        self._cut_off = (
            *(NoConnection, HTTPClientError, IncompleteReadError),
            *(CutOff, FlexibleChecksumError, ResponseParserError),  # answers that are cut off, or are not S3's
        )
        # Sent once: the protocol repeats it, since it knows how long a lease has left.
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            max_pool_connections=self.readers,
            retries={"total_max_attempts": 1},
        )
        try:
            self._client: Any = boto3.client("s3", config=config)
        except BotoCoreError as error:
            raise StoreError(f"{self.root} cannot be opened: {error}") from error

    def read(self, key: str) -> Stored | None:
        """See `Store`."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=self._name(key))
            with closing(answer["Body"]) as body:
                data = body.read(LARGEST_OBJECT_BYTES + 1)
        except self._errors as error:
            if _code(error) in _ABSENT:
                return None
            raise self._failed("read", key, error) from error
        if len(data) != min(answer.get("ContentLength", -1), LARGEST_OBJECT_BYTES + 1):
            raise StoreUnavailable(
                f"{self.root}/{key} cannot be read: the answer is not whole, after {len(data)} bytes"
            )
        return Stored(data, self._version(answer, key))

    def write(self, key: str, data: bytes, version: str | None) -> str:
        """See `Store`."""
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        try:
            answer = self._client.put_object(
                Bucket=self._bucket, Key=self._name(key), Body=data, ContentType="application/json", **condition
            )
        except self._errors as error:
            if _code(error) in _REFUSED | _ABSENT:  # absent: what was to be replaced was deleted
                raise Conflict(f"{self.root}/{key}") from error
            raise self._failed("written", key, error) from error
        return self._version(answer, key)

    def keys(self) -> list[str]:
        """See `Store`."""
        pages = self._client.get_paginator("list_objects_v2")
        found: list[str] = []
        try:
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix, Delimiter="/"):
                if "Name" not in page:  # or a page that is not S3's would be an empty list
                    raise StoreUnavailable(f"{self.root} cannot be listed: the answer is not S3's, or not whole")
                found += [entry["Key"].removeprefix(self._prefix) for entry in page.get("Contents", ())]
        except self._errors as error:
            raise self._failed("listed", "", error) from error
        return [name.removesuffix(SUFFIX) for name in found if name.endswith(SUFFIX)]

    def discard(self, key: str) -> None:
        """See `Store`."""
        try:
            self._client.delete_object(Bucket=self._bucket, Key=self._name(key))
        except self._errors as error:
            raise self._failed("deleted", key, error) from error

    def _name(self, key: str) -> str:
        return f"{self._prefix}{key}{SUFFIX}"

    def _version(self, answer: dict[str, Any], key: str) -> str:
        """Returns the ETag of an answer; raises `StoreUnavailable` for an answer that is not S3's, or whose head was cut."""
        etag: str = answer.get("ETag", "")
        if not etag.endswith('"'):
            raise StoreUnavailable(f"{self.root}/{key}: the answer is not S3's, or not whole: its ETag is {etag!r}")
        return etag

    def _failed(self, what: str, key: str, error: Exception) -> StoreError:
        status = _status(error)
        passes = isinstance(error, self._cut_off) or status in (408, 429) or status >= 500 or _code(error) in _PASSING
        return (StoreUnavailable if passes else StoreError)(f"{self.root}/{key} cannot be {what}: {error}")


def _code(error: Exception) -> str:
    """Returns S3's own error code; empty when there was no answer."""
    response: dict[str, Any] = getattr(error, "response", None) or {}  # a lost connection's is None
    return str(response.get("Error", {}).get("Code", ""))


def _status(error: Exception) -> int:
    """Returns the HTTP status of an error; 0 when there was no answer."""
    response: dict[str, Any] = getattr(error, "response", None) or {}  # a lost connection's is None
    return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
