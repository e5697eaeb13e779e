"""Objects of a Google Cloud Storage bucket, written on condition of their generation, which rises with every write.

Needs the extra `gs`. google-cloud-storage finds credentials and project by itself; it supports `STORAGE_EMULATOR_HOST`, too.
"""

from __future__ import annotations

from typing import Any

from counterpoint.sweep.store import LARGEST_OBJECT_BYTES, Conflict, StoreBusy, Stored, StoreError, StoreUnavailable

SUFFIX = ".json"
TIMEOUT = (5, 10)
"""Seconds to connect, and between two bytes."""
ABSENT = 0
"""The generation of an object that does not exist."""


class GoogleStore:
    """A bucket's objects below a prefix."""

    readers = 32
    write_interval = 1.1
    """Google's storage may refuse more than one write a second of one name (https://cloud.google.com/storage/quotas)."""

    def __init__(self, bucket: str, prefix: str) -> None:
        """Raises `ImportError` naming the extra, `ValueError` without a bucket, `StoreError` without credentials."""
        try:
            from google.api_core.exceptions import (
                GoogleAPIError,
                NotFound,
                PreconditionFailed,
                ServerError,
                TooManyRequests,
            )
            from google.auth.exceptions import GoogleAuthError, TransportError
            from google.cloud import storage
            from requests import ConnectionError as NoConnection
            from requests import JSONDecodeError, RequestException, Timeout
            from requests.exceptions import ChunkedEncodingError
            from urllib3.exceptions import HTTPError as CutOff
        except ImportError as error:
            raise ImportError("a sweep on gs:// needs google-cloud-storage: install counterpoint[gs]") from error
        if not bucket:
            raise ValueError("gs:// without a bucket; write gs://bucket/prefix")
        self.root = f"gs://{bucket}/{prefix}"
        self._prefix = f"{prefix}/" if prefix else ""
        self._errors = (GoogleAPIError, GoogleAuthError, RequestException, CutOff)
        self._refused, self._absent, self._busy = PreconditionFailed, NotFound, TooManyRequests
        # The last ones are of answers that are cut off, or are not the storage's.
        self._passing = (
            *(ServerError, TooManyRequests, TransportError, NoConnection, Timeout),
            *(ChunkedEncodingError, CutOff, JSONDecodeError, AttributeError),
        )
        try:
            self._client: Any = storage.Client()
        except (GoogleAuthError, OSError) as error:  # the latter for a project that is not set
            raise StoreError(f"{self.root} cannot be opened: {error}") from error
        # For traces that nobody asked for, the client looks up the bucket in a thread: a right that a worker need not have and,
        # where the storage cannot be reached, two minutes of retries in the process of the body.
        self._client._bucket_metadata_cache = None
        self._bucket: Any = self._client.bucket(bucket)

    def read(self, key: str) -> Stored | None:
        """See `Store`."""
        blob = self._blob(key)
        try:
            # Downloaded at once, the object comes with its generation; asking for that first would be a race.
            data = blob.download_as_bytes(
                end=LARGEST_OBJECT_BYTES, single_shot_download=True, retry=None, timeout=TIMEOUT
            )
        except self._absent:
            return None
        except self._errors as error:
            raise self._failed("read", key, error) from error
        if blob.generation is None or not data:  # no object here is empty
            raise StoreUnavailable(f"{self.root}/{key} cannot be read: the answer is not the storage's, or not whole")
        return Stored(data, str(blob.generation))

    def write(self, key: str, data: bytes, version: str | None) -> str:
        """See `Store`."""
        blob = self._blob(key)
        generation = ABSENT if version is None else int(version)
        try:
            # Sent once: the protocol repeats it, since it knows how long a lease has left.
            blob.upload_from_string(
                data,
                content_type="application/json",
                if_generation_match=generation,
                retry=None,
                timeout=TIMEOUT,
            )
        except (self._refused, self._absent) as error:
            raise Conflict(f"{self.root}/{key}") from error
        except self._busy as error:
            raise StoreBusy(f"{self.root}/{key} cannot be written so soon: {error}") from error
        except self._errors as error:
            raise self._failed("written", key, error) from error
        return str(blob.generation)

    def keys(self) -> list[str]:
        """See `Store`."""
        try:
            blobs = self._client.list_blobs(
                self._bucket, prefix=self._prefix, delimiter="/", retry=None, timeout=TIMEOUT
            )
            names = [blob.name.removeprefix(self._prefix) for blob in blobs]
        except (
            *self._errors,
            AttributeError,
        ) as error:  # the latter for an answer without content: google's client is not ready
            raise self._failed("listed", "", error) from error
        return [name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX)]

    def discard(self, key: str) -> None:
        """See `Store`."""
        try:
            self._blob(key).delete(retry=None, timeout=TIMEOUT)
        except self._absent:
            return
        except self._errors as error:
            raise self._failed("deleted", key, error) from error

    def _blob(self, key: str) -> Any:
        return self._bucket.blob(f"{self._prefix}{key}{SUFFIX}")

    def _failed(self, what: str, key: str, error: Exception) -> StoreError:
        passes = isinstance(error, self._passing) or getattr(error, "code", None) == 408
        return (StoreUnavailable if passes else StoreError)(f"{self.root}/{key} cannot be {what}: {error}")
