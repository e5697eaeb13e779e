"""Resolves a model's name to a directory: builds built-in models into a cache, checks directories, fetches hub names.

A built-in model is built offline and the same every time. The tiny ones (`models.tiny_models`) have random weights and a short
warm-up (`models.warm_up`); `smollm2` is converted from a package (`models.smollm2`). The cache names a model by a hash of all
that determines it: this project's code for it, its seed, and the versions of the packages that build it. So a change of these
builds it again, and nothing else does.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from counterpoint.models import smollm2
from counterpoint.models.tiny_models import ARCHITECTURES
from counterpoint.transport.files.atomic import STABLE, make_readable, publish_directory
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.process.extras import lacking

logger = logging.getLogger(__name__)

BUILT_IN = (*ARCHITECTURES, smollm2.NAME)
"""The names of the built-in models."""

Progress = Callable[[str], None]
"""Called with a line about the progress of the building."""

LONGEST_WAIT_SECONDS = 900.0
"""Longest wait for another process that builds the same model."""

_WAIT_REPORT_SECONDS = 10.0

_BUILDERS = ("torch", "transformers", "safetensors")
"""The packages that build a model; the first two also determine its name in the cache."""

HUB_SECONDS = 10.0
"""Longest wait for the hub's answer whether it has a model."""

_DETERMINING_MODULES = (
    "counterpoint.environments.chat",
    "counterpoint.environments.chat_marks",
    "counterpoint.environments.chat_template",
    "counterpoint.environments.scripted",
    "counterpoint.environments.tasks.arithmetic",
    "counterpoint.environments.tasks.guess_number",
    "counterpoint.environments.tasks.reverse_text",
    "counterpoint.environments.tools.environment",
    "counterpoint.environments.tools.hermes",
    "counterpoint.environments.tools.play",
    "counterpoint.models.demonstrations",
    "counterpoint.models.tiny_models",
    "counterpoint.models.tiny_tokenizer",
    "counterpoint.models.warm_up",
)


def resolve_model(name: str, on_progress: Progress = logger.info) -> Path:
    """Returns the directory of a model.

    Args:
        name: a local directory, a built-in name (built if the cache lacks it), or a hub name (downloaded if necessary).
        on_progress: called with each line about the progress.

    Raises:
        ValueError: there is no such model; the message says what was tried, and what to use instead.
    """
    found = _found(name)
    if found is not None:
        return found
    return make_model(name, on_progress=on_progress) if name in BUILT_IN else _fetch(name)


def model_at_hand(name: str) -> Path | None:
    """Returns the directory of a model that is here already; None for one that `resolve_model` would build or download.

    Raises `ValueError` for a path without a model.
    """
    if (found := _found(name)) is not None:
        return found
    if name in BUILT_IN:
        cached = _cached(name, seed=0)
        return cached.resolve() if (cached / STABLE).exists() else None
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError):
        return None


def _cached(name: str, seed: int) -> Path:
    return cache_directory() / f"{name}-{_fingerprint(name, seed)}"


def check_model(name: str) -> str:
    """Checks that `resolve_model` will find a model, without building or downloading anything.

    Returns why this is not known, of a name whose hub does not answer; else nothing. Raises `ValueError` as `resolve_model`.
    """
    if _found(name) is not None or name in BUILT_IN:
        return ""
    if find_spec("huggingface_hub") is None:
        return f"model = {name!r} is not here{_nearest(name)}; huggingface_hub is not installed, so the hub cannot be asked"
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        snapshot_download(name, local_files_only=True)
    except HFValidationError as error:
        raise _unfetched(name, error) from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise _unfetched(name, error) from error
        try:
            HfApi().model_info(name, timeout=HUB_SECONDS)
        except RepositoryNotFoundError as missing:
            raise _unfetched(name, missing) from missing
        except Exception as unknown:  # noqa: BLE001 - whatever the hub or the way to it does, the name may be right
            reason = f"{type(unknown).__name__}: {unknown}"
            return f"model = {name!r} is not here{_nearest(name)}; the hub cannot be asked: {reason}"
    return ""


def _found(name: str) -> Path | None:
    """The directory of a model that is named by its path; None for a name. Raises `ValueError` for a path without a model."""
    directory = Path(name)
    expected = f"expected a directory, a built-in model ({', '.join(BUILT_IN)}) or the name of a model of the hub"
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ValueError(
                f"model = {name!r}: {directory.resolve()} is not a model: it has no config.json; {expected}"
            )
        return directory.resolve()
    if name in BUILT_IN:
        return None
    if directory.exists():
        raise ValueError(f"model = {name!r}: this is a file; {expected}")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"model = {name!r}: there is no such directory; {expected}")
    return None


def make_model(name: str, directory: Path | None = None, seed: int = 0, on_progress: Progress = logger.info) -> Path:
    """Builds the built-in model `name` and returns its directory, which appears whole or not at all.

    Processes that need the same model at once build it once.

    Args:
        name: of `BUILT_IN`.
        directory: where to build it, new or empty. None: in the cache, unless it is there already.
        seed: of the weights and the warm-up of a tiny model.
        on_progress: called with each line about the progress.

    Raises:
        ValueError: the name is unknown, the directory in use, or the cache not writable.
        TimeoutError: another process has been building the model for `LONGEST_WAIT_SECONDS`.
        OSError: the disk is full, or fails.
    """
    if name not in BUILT_IN:
        raise ValueError(f"model {name!r} is not built in ({', '.join(BUILT_IN)}{_nearest(name)})")
    if reason := lacking(*_BUILDERS) or (name == smollm2.NAME and lacking(*smollm2.PACKAGES)):
        raise ValueError(
            f"model = {name!r} is built on this machine, which {reason}; or name a directory that has a model"
        )
    if directory is not None:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ValueError(f"{directory} is in use: a model is only written to a new or empty directory")
        _build(name, directory, seed, on_progress)
        return directory.resolve()
    cached = _cached(name, seed)
    if not (cached / STABLE).exists():
        _make_writable(cached.parent)
        with _only_builder(cached, on_progress):
            if not (cached / STABLE).exists():  # another process may have built it while this one waited
                _build(name, cached, seed, on_progress)
    return cached.resolve()


def _build(name: str, directory: Path, seed: int, on_progress: Progress) -> None:
    # torch and transformers take seconds to import, and finding a model in the cache needs neither.
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # one file is saved at once

    on_progress(f"{name}: building it at {directory}")
    started = time.monotonic()
    with publish_directory(directory) as partial:
        converted = name == smollm2.NAME
        model = smollm2.write_converted(partial) if converted else _warmed_up(name, partial, seed, on_progress)
        model.save_pretrained(partial)
        make_readable(partial)
    on_progress(f"{name}: built in {time.monotonic() - started:.0f} s")


def _warmed_up(name: str, directory: Path, seed: int, on_progress: Progress) -> Any:
    from counterpoint.models.tiny_models import write_untrained
    from counterpoint.models.warm_up import LESSONS, warm_up

    model = write_untrained(name, directory, seed)
    warm_up(model, LESSONS[name], directory, seed, lambda line: on_progress(f"{name}: {line}"))
    return model


def cache_directory() -> Path:
    """Returns the directory of what is made once for all jobs of a user, such as built-in models; it may not be there yet."""
    if chosen := os.environ.get("COUNTERPOINT_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "counterpoint"


def _make_writable(cache: Path) -> None:
    """Makes the cache's directory. Raises `ValueError` if it cannot be written to."""
    origin = "COUNTERPOINT_CACHE" if os.environ.get("COUNTERPOINT_CACHE") else "the cache"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(cache, os.W_OK | os.X_OK) else "it may not be written to"
    except OSError as error:
        reason = error.strerror
    if reason:
        raise ValueError(
            f"{origin} = {str(cache)!r} cannot hold models: {reason}; set COUNTERPOINT_CACHE to a directory that can be written"
        )


def _fingerprint(name: str, seed: int) -> str:
    """Returns 16 hex digits, a hash of everything that determines the model."""
    converted = name == smollm2.NAME
    packages = ("torch", "transformers", *(smollm2.DISTRIBUTIONS if converted else ()))
    digest = hashlib.sha256(" ".join([name, str(seed), *map(metadata.version, packages)]).encode())
    for module in ("counterpoint.models.smollm2",) if converted else _DETERMINING_MODULES:
        spec = find_spec(module)
        assert spec is not None
        assert spec.origin is not None
        digest.update(Path(spec.origin).read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _only_builder(cached: Path, on_progress: Progress) -> Iterator[None]:
    """Holds the lock on building `cached`. A killed process releases it."""
    lock_path = cached.with_name(f".{cached.name}.lock")
    started = reported = time.monotonic()
    while True:
        try:
            lock = take_lock(lock_path, f"another process is building {cached}")
            break
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        now = time.monotonic()
        if now - started > LONGEST_WAIT_SECONDS:
            raise TimeoutError(
                f"another process has been building {cached} for {LONGEST_WAIT_SECONDS:.0f} s; is that process stopped?"
            )
        if now - reported > _WAIT_REPORT_SECONDS:
            reported = now
            on_progress(f"waiting for another process that builds {cached.name}, {now - started:.0f} s so far")
        time.sleep(0.1)
    try:
        yield
    finally:
        os.close(lock)


def _fetch(name: str) -> Path:
    """Downloads the snapshot of a hub model: configuration, tokenizer and safetensors weights."""
    if find_spec("huggingface_hub") is None:
        raise ValueError(f"model = {name!r} is not here{_nearest(name)}; to ask the hub {lacking('transformers')}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]))
    except (OSError, ValueError) as error:  # all errors of the hub's library derive from these two
        raise _unfetched(name, error) from error


def _unfetched(name: str, error: Exception) -> ValueError:
    return ValueError(
        f"model = {name!r} is no directory here, not built in ({', '.join(BUILT_IN)}{_nearest(name)}), and cannot be "
        f"fetched from the hub: {type(error).__name__}: {' '.join(str(error).splitlines()[:1])}"
    )


def _nearest(name: str) -> str:
    matches = difflib.get_close_matches(name, BUILT_IN, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""
