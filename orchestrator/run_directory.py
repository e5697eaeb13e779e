"""The run's directory: taking it over, its configuration, and rewinding it on resume.

Trainer and operator answer by files in `control/`, such as a refused configuration or an eviction.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import tomli_w

from counterpoint.inference.loads import MAX_OWNER, LoadClaim
from counterpoint.run.config import RunConfig
from counterpoint.transport.files.atomic import remove_directory, write_atomically
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.process.permanent_errors import is_passing, is_permanent

logger = logging.getLogger(__name__)

_REFUSAL = "config_validation_error.txt"
_LOCK = "orchestrator.lock"
_CLAIM = "weights_owner"
_ADDRESS = "endpoint.json"
_CLAIM_BYTES = 16

_devices: dict[Path, int] = {}
"""The file systems of the run directories that this process has taken over."""


class ConfigurationError(ValueError):
    """A configuration that cannot be run. The message says which value, where and what to do."""


class StartError(RuntimeError):
    """A start that failed because something did not answer, so the next may succeed. The message says what, where and why."""


def refusal(error: Exception) -> ConfigurationError | StartError:
    """Returns the error of a start that failed with `error`: `StartError` if that is passing, else `ConfigurationError`."""
    return (StartError if is_passing(error) else ConfigurationError)(str(error))


class RunEvictedError(RuntimeError):
    """The run must end: `control/evicted.txt` exists, or the directory was deleted."""


def holds_run(run_dir: Path) -> bool:
    """Returns whether a run has begun in the directory, or something else is there.

    An orchestrator whose configuration was refused leaves a lock, its log, and empty directories, which are no run.
    """
    left = {_LOCK, _CLAIM, _ADDRESS, "orchestrator.log", "decisions.jsonl"}
    return any(path.name not in left for path in run_dir.rglob("*") if not path.is_dir())


@contextmanager
def taken_over(config: RunConfig) -> Iterator[None]:
    """Creates the run's directory, or accepts an existing one with `resume`, and locks it during the block.

    Two orchestrators of one run would undo each other's steps. Raises `ConfigurationError`, and `OSError` for an obstacle that
    may be gone at the next attempt.
    """
    run_dir = config.run_dir
    try:
        if holds_run(run_dir) and not config.resume:
            raise ConfigurationError(
                f"{run_dir} already holds a run. --resume (in a file: resume = true) continues it; or choose another "
                "output_dir or run_id, or remove the directory"
            )
        for name in ("control", "checkpoints", "rollouts", "broadcast"):
            (run_dir / name).mkdir(parents=True, exist_ok=True)
        lock = take_lock(run_dir / _LOCK, "another orchestrator runs in it; stop that one first")
    except OSError as error:
        message = f"output_dir = {config.output_dir}: cannot write {run_dir}: {error.strerror}"
        if is_permanent(error):
            raise ConfigurationError(message) from error
        raise OSError(error.errno, message) from error
    for address in (
        run_dir / "control" / _ADDRESS,
        config.output_dir / "prometheus" / f"orchestrator_{config.run_id}.json",
    ):
        with suppress(OSError):
            address.unlink()  # of a process that was killed: where nobody listens, a health check would call this one dead
    _devices[run_dir] = run_dir.parent.stat().st_dev
    try:
        yield
    finally:
        del _devices[run_dir]
        os.close(lock)


def claim_of(config: RunConfig) -> LoadClaim:
    """Returns the claim by which the run owns weights at servers, the same on every resume.

    Makes its key once, in a file of the run's directory that only its user may read. Raises `OSError`.
    """
    path = config.run_dir / _CLAIM
    key = path.read_text().strip() if path.exists() else ""
    if len(key) != 2 * _CLAIM_BYTES:
        key = secrets.token_hex(_CLAIM_BYTES)
        write_atomically(path, f"{key}\n".encode(), mode=0o600)
    owner = f"run {config.run_id!r} in {config.run_dir.absolute()} (process {os.getpid()} on {socket.gethostname()})"
    return LoadClaim(key, owner[-MAX_OWNER:])


def write_config(config: RunConfig) -> None:
    """Removes the refusal of an earlier configuration, then writes `control/orch.toml`, for which the trainer waits."""
    control = config.run_dir / "control"
    (control / _REFUSAL).unlink(missing_ok=True)
    resolved = config.model_dump(mode="json", exclude_none=True)
    write_atomically(control / "orch.toml", tomli_w.dumps(resolved).encode())


def check_control(run_dir: Path) -> None:
    """Raises `RunEvictedError` or `ConfigurationError` with the reason in `control/`, or when `control/` is gone.

    Raises `OSError` if the file system is gone, and not only the directory.
    """
    if _is_unmounted(run_dir):
        raise OSError(errno.ENOTCONN, "its file system is not mounted any more", str(run_dir))
    if is_deleted(run_dir):
        raise RunEvictedError(f"the run's directory {run_dir} was deleted")
    verdicts: tuple[tuple[str, Callable[[str], Exception]], ...] = (
        ("evicted.txt", lambda reason: RunEvictedError(f"this run was evicted: {reason}")),
        (
            _REFUSAL,
            lambda reason: ConfigurationError(f"the trainer refuses the run: {reason}"),
        ),
    )
    for name, verdict in verdicts:
        path = run_dir / "control" / name
        if path.exists():
            reason = path.read_text(encoding="utf-8", errors="replace").strip() or "no reason given"
            raise verdict(f"{reason} ({path})")


def config_is_refused(run_dir: Path) -> bool:
    """Whether the trainer has refused the configuration of this process."""
    return (run_dir / "control" / _REFUSAL).exists()


def is_deleted(run_dir: Path) -> bool:
    """Whether the directory of a running run was deleted. `control/` shows it, since nothing creates that again."""
    return not (run_dir / "control").is_dir() and not _is_unmounted(run_dir)


def _is_unmounted(run_dir: Path) -> bool:
    """Whether the nearest directory above a run's is on another file system than when the run was taken over."""
    device = _devices.get(run_dir)
    nearest = next(above for above in run_dir.absolute().parents if above.exists())
    return device is not None and nearest.stat().st_dev != device


def finish_deletion(run_dir: Path) -> None:
    """Removes files that the run wrote in place of its deleted directory before it noticed the deletion. Raises nothing.

    A directory that holds the lock is the old one and stays.
    """
    if not (run_dir / _LOCK).exists():
        shutil.rmtree(run_dir, ignore_errors=True)


def prune_rollouts(run_dir: Path, newest_step: int, keep: int) -> None:
    """Removes `rollouts/step_N`, except for the newest `keep` steps and those that the trainer may still request. Blocks.

    Goes back step by step until a directory is missing, so the work is proportional to the removed steps. A failure is only
    logged.
    """
    step = newest_step - keep
    try:
        while (directory := run_dir / "rollouts" / f"step_{step}").is_dir():
            if not (directory / "batch.bin").exists():
                remove_directory(directory)
            step -= 1
    except OSError as error:
        logger.warning("%s cannot be removed and takes disk space until it is: %s", directory, error)


def rewind(run_dir: Path, newest_step: int) -> None:
    """Removes a killed process's files after its last commit: rollouts that were never sent, and incomplete directories."""
    for parent in (run_dir / "rollouts", run_dir / "raw_rollouts", run_dir / "checkpoints"):
        for directory in sorted(parent.glob("step_*")) + sorted(parent.glob(".*.partial")):
            step = directory.name.removeprefix("step_")
            if not step.isdigit() or int(step) > newest_step:
                logger.info("removing %s: it is newer than the last commit, step %d", directory, newest_step)
                remove_directory(directory)
