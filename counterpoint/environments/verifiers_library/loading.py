"""Loads an environment of the library by its id, import path or directory, with its own configuration.

The library names its parts (tasksets, environments, harnesses) by the top-level module of an installed package. What is given
otherwise gets such a name here. Two of the library's defaults are replaced where neither the configuration nor the environment's
author chose: an agent's program is a chat with tools in this process (`chat_harness`) instead of a shell, and its place is this
machine instead of a rented sandbox.
"""

from __future__ import annotations

import asyncio
import copy
import importlib
import importlib.util
import logging
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import verifiers.v1 as vf
from pydantic import BaseModel, ValidationError
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils import loaders

from counterpoint.environments.import_path import LIBRARY_KEYS, check_allowed, import_advice, import_module

CHAT_HARNESS = "counterpoint_chat"
MOST_TASKS = 10_000_000
_DIGESTED = 1000
_SERVER_SECONDS = 10.0
_PACKAGES = {
    "harbor": (
        "harbor", (3, 12),
        "it plays in Docker, or at a provider: pip install 'verifiers[harbor]'. Tasks that need no image are played by kind = "
        "\"harbor\" without either (docs/environments.md)",
    ),
    "openenv": ("openenv", (3, 11), "pip install 'verifiers[openenv]'"),
    "textarena": (
        "textarena", (3, 11), "pip install 'verifiers[ta]'. Its games load word lists of NLTK from the network, once"
    ),
}  # fmt: skip
"""What tasksets of the library's own need beside it: a package, the least Python, and what to do."""
_OLD_FORM = re.compile(r"^(?:def load_environment\(|from \S+ import .*\bload_environment\b)", re.MULTILINE)


def load(identity: str, taskset: Mapping[str, Any], env: Mapping[str, Any]) -> Any:
    """Returns the library's `Env`. Raises `ValueError` that names the key and value at fault."""
    _check_allowed({"id": identity, "taskset": taskset, "env": env})
    _check_needs(identity, taskset)
    try:
        return _load(identity, taskset, env)
    except Exception as error:
        if _has_old_form(identity):
            raise ValueError(
                f"id = {identity!r}: it defines load_environment, the form of verifiers before 0.4, which release 0.4 cannot "
                "load; use a release of this environment for verifiers 0.4, or migrate it (docs/verifiers.md)"
            ) from error
        raise


def _load(identity: str, taskset: Mapping[str, Any], env: Mapping[str, Any]) -> Any:
    _quiet()
    _name(CHAT_HARNESS, importlib.import_module("counterpoint.environments.verifiers_library.chat_harness"))
    _refuse("taskset", taskset, {"id": "the argument `id` names it"})
    _refuse("env", env, {"taskset": "give the argument `taskset`", "interception": "it is Counterpoint's"})
    taskset_id = importable(identity, "id")
    settings: dict[str, Any] = copy.deepcopy(dict(env))
    env_id = settings["id"] = importable(str(settings.get("id") or ""), "env.id")
    settings["taskset"] = copy.deepcopy(dict(taskset)) | {"id": taskset_id}
    settings["interception"] = {"type": "server"}
    try:
        _local_agents(settings, taskset_id, env_id)
        return loaders.load_environment(loaders.resolve_env_config(settings))
    except ValidationError as error:
        raise ValueError(_described(error)) from error


def _check_needs(identity: str, taskset: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a taskset of the library's own, if what it needs beside the library is not on this machine."""
    name = identity.replace("-", "_").lower()
    package, release, advice = _PACKAGES.get(name, ("", (3, 11), ""))
    if sys.version_info < release:
        raise ValueError(f"id = {identity!r} needs Python {release[0]}.{release[1]} or newer; {advice}")
    if package and importlib.util.find_spec(package) is None:
        raise ValueError(f"id = {identity!r} needs the package {package}; {advice}")
    if name == "openenv" and not taskset.get("base_url"):
        program = "docker" if taskset.get("use_docker") else "uv"
        if shutil.which(program) is None:
            raise ValueError(
                f"id = 'openenv' without taskset.base_url starts a server by {program}, which is not on PATH; install it, or "
                'start the server yourself and give taskset = { base_url = "http://..." }'
            )
    task = taskset.get("task")
    if name == "nemo_gym" and not (isinstance(task, Mapping) and task.get("resources_url")):
        raise ValueError(
            "id = 'nemo_gym' needs a resource server of NeMo Gym that runs: start it, and give taskset = { dataset = ..., "
            'task = { resources_url = "http://..." } }'
        )


def server_of(taskset: Any) -> str:
    """Returns the URL of the server that a taskset of the library's own plays at, or an empty text."""
    config = taskset.config
    return str(getattr(config, "base_url", None) or getattr(getattr(config, "task", None), "resources_url", None) or "")


async def check_server(url: str) -> None:
    """Raises `ValueError` if nothing listens at the server of a taskset."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(_SERVER_SECONDS):
            _, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
            )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"the taskset's server does not answer at {url}: {error or type(error).__name__}; start it first"
        ) from error
    writer.close()


def _check_allowed(table: Any, where: str = "") -> None:
    """Raises `ValueError` for what the library would import, wherever it is named, and this process may not load."""
    for key, value in table.items() if isinstance(table, Mapping) else enumerate(table):
        if isinstance(value, Mapping | list):
            _check_allowed(value, f"{where}{key}.")
        elif key in LIBRARY_KEYS and value:
            check_allowed(str(value), f"{where}{key}")


def _has_old_form(identity: str) -> bool:
    """Whether the source of an environment that could not be loaded defines `load_environment`."""
    name = identity.rstrip("/").rpartition("/")[2].partition("@")[0].partition(":")[0]
    try:
        spec = importlib.util.find_spec(name.removesuffix(".py").replace("-", "_"))
        source = "" if spec is None or spec.origin is None else Path(spec.origin).read_text(errors="replace")
    except (ImportError, AttributeError, ValueError, OSError):  # a parent module that fails, or no file
        return False
    return _OLD_FORM.search(source) is not None


def select(taskset: Any, wanted: Mapping[str, Any]) -> list[Any]:
    """Returns the tasks that `wanted`, a table of the library's `SelectConfig`, names. Raises `ValueError`."""
    try:
        view = taskset.select(vf.SelectConfig.model_validate(dict(wanted)))
    except ValidationError as error:
        raise ValueError(_described(error, "select")) from error
    if not view.bounded:
        raise ValueError("the taskset is infinite: say how many of its tasks to use, with select = { limit = 1000 }")
    tasks = list(islice(view, MOST_TASKS + 1))
    if len(tasks) > MOST_TASKS:
        raise ValueError(f"the taskset has more than {MOST_TASKS} tasks: use fewer, with select = {{ limit = ... }}")
    return tasks


def importable(identity: str, key: str) -> str:
    """Returns the library's name for an id, an import path (`package.module` or `package.module:Class`) or a directory.

    Raises `ValueError`.
    """
    path = Path(identity).expanduser()
    if identity.startswith((".", "/", "~")) or identity.endswith(".py"):
        return _of_directory(path, key)
    if {"/", "@"} & set(identity) or not {".", ":"} & set(identity):
        return identity  # of the library, OWNER/NAME@VERSION
    module_name, _, class_name = identity.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # anybody's module
        raise ValueError(
            f"{key} = {identity!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
            f"{import_advice(module_name, error)}"
        ) from error
    if class_name:
        if not isinstance(getattr(module, class_name, None), type):
            raise ValueError(f"{key} = {identity!r}: {module_name} has no class {class_name!r}")
        exported = ModuleType(module_name)
        exported.__dict__.update({class_name: getattr(module, class_name), "__all__": [class_name]})
        module = exported
    alias = "counterpoint_" + identity.replace(".", "_").replace(":", "__").lower()
    _name(alias, module)
    return alias


def _of_directory(path: Path, key: str) -> str:
    """Puts the directory of an environment's package on the import path, as an installation would."""
    path = path.resolve()
    if path.is_file() or (path / "__init__.py").is_file():
        home, name = path.parent, path.stem
    else:
        home, name = path, path.name.replace("-", "_")
    found = [home / name / "__init__.py", home / f"{name}.py"]
    if not any(file.is_file() for file in found):
        raise ValueError(f"{key} = {str(path)!r}: expected one of {', '.join(map(str, found))}")
    if name != name.lower():
        raise ValueError(f"{key} = {str(path)!r}: the library takes module names in lower case only; rename {name}")
    importlib.invalidate_caches()
    there = importlib.util.find_spec(name)
    if there is not None and (there.origin is None or Path(there.origin).resolve() not in found):
        raise ValueError(f"{key} = {str(path)!r}: a module {name!r} exists already ({there.origin}); rename yours")
    # Last, so that no other module of it takes one's place.
    if str(home) not in sys.path:
        sys.path.append(str(home))
    # The library starts tool servers by `python -m`.
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    if str(home) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, str(home)])
    return name


def _local_agents(settings: dict[str, Any], taskset_id: str, env_id: str) -> None:
    """Sets program and place of the agents for which neither the configuration nor the author chose one."""
    config_type = loaders.env_config_type(taskset_id, env_id)
    bundled = loaders.default_harness_id(taskset_id)
    for name, field in config_type.model_fields.items():
        if not isinstance(field.default, vf.AgentConfig):
            continue
        agent = settings.setdefault(name, {})
        if not isinstance(agent, dict):
            continue  # for the library to refuse
        if "runtime" not in agent and "runtime" not in field.default.model_fields_set:
            agent["runtime"] = {"type": "subprocess"}
        author = field.default.harness
        chosen = agent.get("harness")
        program = chosen.get("id", "null") if isinstance(chosen, dict) else author.id if author else bundled
        given = isinstance(chosen, dict) and "id" in chosen
        if program == "null" or (program == "bash" and not given and author is None):
            kept = author.model_dump(exclude_unset=True) if author and not given else {}
            agent["harness"] = kept | (chosen if isinstance(chosen, dict) else {}) | {"id": CHAT_HARNESS}


def fingerprint(tasks: Sequence[Any]) -> str:
    """A digest of the tasks: of all up to a thousand, else of a thousand between the first and the last."""
    step = max(1, len(tasks) // _DIGESTED)
    digest = blake2b(str(len(tasks)).encode(), digest_size=16)
    for task in [*tasks[::step], *tasks[-1:]]:
        digest.update(task.hash.encode())
    return digest.hexdigest()


def agent_names(env: Any) -> list[str]:
    """The names of an environment's agents."""
    return list(agent_config_fields(env.config))


def _name(name: str, module: ModuleType) -> None:
    """Makes a module importable under a top-level name, since the library knows no other."""
    sys.modules[name] = module


def _quiet() -> None:
    """Leaves a library's warnings in the log, and not two lines for each rollout."""
    logger = logging.getLogger("verifiers.v1")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.WARNING)


def _refuse(table: str, given: Mapping[str, Any], taken: Mapping[str, str]) -> None:
    for name, advice in taken.items():
        if name in given:
            raise ValueError(f"{table}.{name} = {given[name]!r}: not to be given here; {advice}")


def _described(error: ValidationError, table: str = "") -> str:
    """The library's refusal of a configuration, as keys and values."""
    lines = []
    for fault in error.errors(include_url=False, include_context=False):
        where = [str(part) for part in fault["loc"]]
        where = [table, *where] if table else where if where[:1] == ["taskset"] else ["env", *where]
        value = fault["input"]
        shown = "" if isinstance(value, dict | BaseModel) and not value else f" = {str(value)[:80]!r}"
        lines.append(f"{'.'.join(where)}{shown}: {fault['msg']}")
    return "; ".join(lines)
