"""Checks that what a configuration names on this machine is there: keys, tokens, certificates, templates, adapters.

Each is checked by the function that its role will read it with. What an environment names, such as its rows, is checked when the
environment is loaded (`counterpoint/job/check.py`), and the model by `counterpoint/job/resolve_model.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from counterpoint.inference.token import read_tokens
from counterpoint.job.sections import JobSections
from counterpoint.run.adapter_description import check_description
from counterpoint.run.config import RunConfig
from counterpoint.run.trained import TrainingConfig
from counterpoint.transport.errors import Obstructed, UserError
from counterpoint.transport.files.mounts import unmounted
from counterpoint.transport.process.permanent_errors import is_passing

FILE_FLAGS = ("--chat-template", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs")
"""Flags of vLLM that name a file."""


def check_job_files(config: JobSections) -> None:
    """Raises `UserError` for a file that is named by the keys which all runs share, and cannot be read."""
    if config.inference.replicas:
        _check("inference.", config.inference.api_key_file, read_tokens)
        for flag, value in _files_of_vllm(config.inference.extra_args):
            if not Path(value).is_file():
                raise _missing(value)(f"inference.extra_args: {flag} = {value!r}: there is no such file")
    from counterpoint.transport.wires.endpoint import load_authorized_keys, load_keys

    try:
        if (keys := load_keys(config.transport)) is not None:
            load_authorized_keys(config.transport, keys)
    except ValueError as error:
        raise (Obstructed if is_passing(error) else UserError)(str(error)) from None


def check_run_files(config: RunConfig) -> None:
    """Raises `UserError` for a file that a run names, and that its orchestrator cannot read."""
    _check("inference.", config.inference.api_key_file, read_tokens)
    if config.inference.ca_file is not None:
        from counterpoint.inference.clients.http_sessions import tls_of

        _check("inference.", config.inference.ca_file, tls_of)
    if config.teacher is not None:
        _check("teacher.", config.teacher.api_key_file, read_tokens)
    for name, opponent in config.opponents.items():
        _check(f"opponents.{name}.", opponent.api_key_file, read_tokens)


def check_beginning(training: TrainingConfig) -> None:
    """Raises `UserError` unless a run's first adapter and its reference's weights are in the directories that are named."""
    lora, reference = training.lora, training.reference
    for key, directory, file in (
        ("lora.start_from", lora.start_from if lora is not None else None, "adapter_config.json"),
        ("reference.model", reference.model if reference is not None else None, "config.json"),
    ):
        if directory is not None and not (directory / file).is_file():
            raise _missing(directory)(f"training.{key} = '{directory}': there is no {file} in that directory")
    if lora is not None and lora.start_from is not None:
        try:
            check_description(lora.start_from, lora)
        except (OSError, ValueError) as error:
            raise UserError(f"training.lora.start_from = '{lora.start_from}': {error}") from None


def _check(above: str, file: Path | None, read: Callable[[Path], object]) -> None:
    """Reads a file by the function whose `ValueError` begins with the last part of the key."""
    if file is None:
        return
    try:
        read(file)
    except ValueError as error:
        raise (Obstructed if is_passing(error) else UserError)(f"{above}{error}") from None


def _missing(path: str | Path) -> type[UserError]:
    """Returns the kind of error of a missing file: its file system may not be mounted yet."""
    return Obstructed if unmounted(path) else UserError


def _files_of_vllm(arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Yields the flags that name a file, and the file. A template may also be text, or one of vLLM's own by its bare name."""
    for argument, following in pairwise([*arguments, ""]):
        flag, equals, value = argument.partition("=")
        flag, value = flag.replace("_", "-"), value if equals else following
        is_path = flag != "--chat-template" or ("/" in value and not any(sign in value for sign in "{}\n"))
        if flag in FILE_FLAGS and is_path:
            yield flag, value
