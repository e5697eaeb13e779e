"""Logging of the daemon: a thread writes queued records to the run's `orchestrator.log` and to stderr.

A job keeps its orchestrators' stderr beside their runs. Text is then written there once.

A full disk or a slow terminal never blocks the loop. Context variables hold the step, group and rollout of a record.
"""

from __future__ import annotations

import contextvars
import logging
import logging.handlers
import os
import queue
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import orjson

from counterpoint.transport.process.journal import formatter_for

run_context: contextvars.ContextVar[str | None] = contextvars.ContextVar("run", default=None)
step_context: contextvars.ContextVar[int | None] = contextvars.ContextVar("step", default=None)
group_context: contextvars.ContextVar[int | None] = contextvars.ContextVar("group", default=None)
rollout_context: contextvars.ContextVar[str | None] = contextvars.ContextVar("rollout", default=None)

_CONTEXT: dict[str, contextvars.ContextVar[Any]] = {
    "run": run_context, "step": step_context, "group": group_context, "rollout": rollout_context,
}  # fmt: skip

LOG_BYTES, OLD_LOGS = 64 * 2**20, 4
"""Size of the log file in bytes, and the number of full ones kept beside it."""


def set_context(*, step: int | None = None, group: int | None = None, rollout: str | None = None) -> None:
    """Sets the context of the current task's records. Replaces all that it inherited from the task that started it."""
    step_context.set(step)
    group_context.set(group)
    rollout_context.set(rollout)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, logger, message, and the context that is set."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, without a newline."""
        line = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_text:
            line["exception"] = record.exc_text
        return orjson.dumps(line | getattr(record, "context", {}), default=str).decode()


class TextFormatter(logging.Formatter):
    """Time, level, message and context, for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Returns the text, in several lines for an exception."""
        text = super().format(record)
        context = " ".join(f"{name}={value}" for name, value in getattr(record, "context", {}).items() if name != "run")
        return f"{text}  [{context}]" if context else text


class _ContextHandler(logging.handlers.QueueHandler):
    """Queues a record with the context of the task that logs, and its exception as text."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        record.context = {name: value for name, variable in _CONTEXT.items() if (value := variable.get()) is not None}
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        return record


def set_level(level: str) -> None:
    """Logs records of this level and above from now on."""
    logging.getLogger().setLevel(level.upper())


@contextmanager
def logging_to(path: Path, log_format: Literal["text", "json"], level: str = "info") -> Iterator[None]:
    """Sends records of `level` and above of every logger to `path` (appended) and stderr during the block.

    Text goes to stderr alone if that is already the log of this orchestrator in the job's directory. A full file is renamed to
    `path`.1, the former `path`.1 to `path`.2 and so on, and the oldest is removed. On exit, writes all queued records and
    restores the former set-up. Raises `OSError` when the file cannot be opened.
    """
    terminal = logging.StreamHandler(sys.stderr)
    terminal.setFormatter(formatter_for(sys.stderr, TextFormatter()))
    handlers: list[logging.Handler] = [terminal]
    if log_format == "json" or not _is_kept(path):
        file = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=OLD_LOGS, encoding="utf-8")
        file.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
        handlers.append(file)
    records: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = _ContextHandler(records)
    listener = logging.handlers.QueueListener(records, *handlers)
    root = logging.getLogger()
    former = root.level
    root.addHandler(handler)
    set_level(level)
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(former)
        listener.stop()
        for each in handlers:
            each.close()


def _is_kept(path: Path) -> bool:
    """Whether stderr is a log of an orchestrator in the directory of the job to which the run with the log `path` belongs."""
    try:
        found = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # closed, or no file
        return False
    return any(os.path.samestat(found, log.stat()) for log in path.parent.parent.glob(f"{path.stem}*{path.suffix}"))
