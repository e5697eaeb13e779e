"""A directory of a judge's answers, by a digest of all that they depend on. Several processes and runs may share it.

A file appears whole or not at all, names its own key and has a checksum, so that a killed process, a full disk or a stranger's
file costs an answer and never gives a wrong one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from counterpoint.transport.files.atomic import write_atomically
from counterpoint.transport.files.untrusted import read_json

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 * 2**20
_STALE_SECONDS = 3600.0
"""Age of a `.partial` file whose writer must be gone."""
_KEPT_SHARE = 0.9
"""The share of `entries` that a removal leaves, so that the next removal is far."""


@dataclass(frozen=True, slots=True)
class JudgeAnswer:
    """What a judge wrote, and its tokens as the server counts them; None where it does not say."""

    text: str
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    model: str = ""
    """The model that answered, as the server names it, with its fingerprint; empty where it does not say."""

    @property
    def values(self) -> dict[str, Any]:
        """Returns them as a file has them. One of before models were noted has none, and its checksum stays."""
        return {name: value for name, value in asdict(self).items() if name != "model" or value}


class AnswerCache:
    """Keeps at most `entries` answers, the least recently used removed first. All methods block on the disk.

    Each process looks at the directory once in `entries` / 10 answers that it adds, so that it may hold so many more for each.
    """

    def __init__(self, directory: Path, entries: int) -> None:
        self._directory = directory
        self._entries = entries
        self._until_check = 0

    def get(self, key: str) -> JudgeAnswer | None:
        """Returns the answer, or None if there is none that can be read."""
        path = self._path(key)
        try:
            found = read_json(path, MAX_FILE_BYTES)
            answer = JudgeAnswer(**found["answer"])
            if (
                found["key"] != key
                or found["checksum"] != _checksum(answer)
                or not isinstance(answer.text, str)
                or not isinstance(answer.model, str)
            ):
                raise ValueError("it does not hold what it says")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            logger.warning("cache of a judge: %s is not used: %s", path, error)
            return None
        with suppress(OSError):
            os.utime(path)
        return answer

    def put(self, key: str, answer: JudgeAnswer) -> None:
        """Keeps an answer. A disk that takes none is logged: the answer is then asked for again."""
        path = self._path(key)
        content = orjson.dumps({"key": key, "checksum": _checksum(answer), "answer": answer.values})
        if len(content) > MAX_FILE_BYTES:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content, durable=False)
            self._until_check -= 1
            if self._until_check < 0:
                self._until_check = self._entries // 10
                self._remove_oldest()
        except OSError as error:
            logger.warning("cache of a judge: %s was not written: %s", path, error)

    def _path(self, key: str) -> Path:
        return self._directory / key[:2] / f"{key}.json"

    def _remove_oldest(self) -> None:
        found: list[tuple[float, Path]] = []
        now = time.time()
        for path in self._directory.glob("[0-9a-f][0-9a-f]/*"):
            with suppress(OSError):  # another process may have removed it
                age = path.stat().st_mtime
                if path.suffix == ".json":
                    found.append((age, path))
        for path in self._directory.glob("[0-9a-f][0-9a-f]/.*.partial"):
            with suppress(OSError):
                if now - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
        if len(found) <= self._entries:
            return
        for _, path in sorted(found)[: len(found) - int(self._entries * _KEPT_SHARE)]:
            path.unlink(missing_ok=True)


def key_of(request: dict[str, Any]) -> str:
    """Returns the key of a request: a digest of its content."""
    return hashlib.blake2b(orjson.dumps(request, option=orjson.OPT_SORT_KEYS), digest_size=20).hexdigest()


def _checksum(answer: JudgeAnswer) -> str:
    return hashlib.blake2b(orjson.dumps(answer.values), digest_size=8).hexdigest()
