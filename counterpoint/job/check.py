"""Finds errors of a job before anything starts: in its runs' environments, advantages and losses, and in its servers' ports.

Built-in kinds are checked in this process. Kinds that an operator names by import path are loaded by a child process,
`python -m counterpoint.job.check`, as the role will load them: none of their code runs in `counterpoint run` itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from counterpoint.cluster.errors import BackendError
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.import_path import variable_of
from counterpoint.inference.early_program import on_cpu
from counterpoint.inference.port_claim import check_port
from counterpoint.inference.server import check_configuration
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.layers import forget_environment
from counterpoint.job.configuration.named_files import check_beginning, check_job_files, check_run_files
from counterpoint.job.plan.servable import check_served
from counterpoint.job.resolve_model import check_model
from counterpoint.job.sections import ServersConfig
from counterpoint.job.tracking.sinks_of import check_extras
from counterpoint.run.config import RunConfig
from counterpoint.service.config import TinkerConfig
from counterpoint.service.keys import check_access
from counterpoint.service.tinker.weights.imports import check_adapters
from counterpoint.transport.errors import Obstructed, UserError
from counterpoint.transport.process import child
from counterpoint.transport.process.exit_codes import describe_exit
from counterpoint.transport.process.permanent_errors import is_passing, is_permanent
from counterpoint.transport.process.resident import available_bytes

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""A variable of every role's environment. With it, Python imports nothing of the working directory in place of another module;
an operator's modules there are found last (`counterpoint/environments/import_path.py`)."""

CHECK_SECONDS = 60.0
"""Time limit for loading everything that is named by import path. The slowest import is torch from a cold disk; a module that
takes longer most likely waits for something."""

_UNPARSED = "--calls-not-parsed"
"""The child's only argument: its runs' servers do not parse calls of tools."""


def check_run(config: RunConfig, *, calls_parsed: bool = True) -> None:
    """Checks the built-in kinds of a run. `calls_parsed`: whether its servers parse calls of tools, as far as is known.

    Raises `UserError` for an environment or advantage that does not exist or whose arguments are invalid, and for an environment
    with tools that the servers do not parse; its subclass `Obstructed` where something that an environment needs does not answer.
    """
    from counterpoint.orchestrator.step.advantages import load_advantage

    for place, (environment, _) in config.every_environment.items():
        if ":" not in environment.kind:
            try:
                _load_environment(environment, config.model, calls_parsed)
            except ValueError as error:
                raise (Obstructed if is_passing(error) else UserError)(f"{place}: {error}") from None
    if ":" not in config.advantage.kind:
        try:
            load_advantage(config.advantage)
        except ValueError as error:
            raise UserError(str(error)) from None


def check_runs(config: JobConfig) -> None:
    """Checks all runs of a job, as `check_run` and then `check_imports`, and raises as they do.

    On one machine also the files that they name, and what a new run's training begins with.
    """
    calls_parsed = config.inference.replicas == 0 or config.inference.parses_calls
    for run in config.every_run:
        try:
            check_run(run, calls_parsed=calls_parsed)
            if config.backend == "local":
                check_run_files(run)
                if not config.resume:
                    check_beginning(run.training)
        except UserError as error:
            raise type(error)(f"run {run.run_id!r}: {error}" if config.runs else str(error)) from None
    try:
        check_imports(config.every_run, calls_parsed=calls_parsed)
    except UserError as error:  # of several runs, the error names the one
        raise type(error)(f"run {config.runs[0].run_id!r}: {error}" if len(config.runs) == 1 else str(error)) from None


def check_job(config: JobConfig) -> None:
    """Checks a job before anything starts: its runs, as `check_runs`, what it names on this machine, and the libraries it needs.

    Raises `UserError`.
    """
    check_model(config.model)
    if config.backend == "local":
        check_job_files(config)
    check_runs(config)
    if ((model := Path(config.model)) / "config.json").is_file():
        if not any(any(model.glob(weights)) for weights in ("*.safetensors", "pytorch_model*.bin")):
            raise UserError(f"model = {config.model!r}: there are no weights in that directory; expected *.safetensors")
        check_fit(config.with_model(model.resolve()))
    check_extras(config.tracking)
    if config.tinker is not None:
        check_access(config.tinker)
        check_adapters(config.tinker.adapters, config.tinker.max_rank)


def check_fit(config: JobConfig) -> None:
    """Raises `UserError` if the job's model, a directory, does not fit what its servers and its chat template are asked for.

    A server on another machine checks itself. A chat template is refused that drops what messages say, or that never reads
    `chat_template_kwargs`.
    """
    if config.inference.replicas and config.backend == "local":
        try:
            check_configuration(config.inference)
            check_served(config.inference)
        except ValueError as error:
            raise UserError(f"inference: {error}") from None
    from counterpoint.environments.chat import Chat

    chats: dict[str, Chat] = {}
    for run in config.every_run:
        for environment, sampling in run.every_environment.values():
            try:
                chat = chats[run.model] = chats.get(run.model) or Chat(run.model)
                chat.with_template_kwargs(sampling.chat_template_kwargs).check()
            except ValueError as error:
                raise UserError(f"run {run.run_id}, environment {environment.name}: {error}") from None


def check_memory(config: ServersConfig) -> None:
    """Raises `Obstructed` if this machine has less memory available than the KV caches of its servers take on a CPU."""
    if not config.replicas or config.kv_cache_gib is None or not on_cpu():
        return
    needed, available = config.replicas * config.kv_cache_gib, available_bytes()
    if available is None or needed * 2**30 <= available:
        return
    servers = (
        f"{config.replicas} servers take {needed} GiB" if config.replicas > 1 else f"the server takes {needed} GiB"
    )
    raise Obstructed(
        f"inference.kv_cache_gib = {config.kv_cache_gib}: {servers} for KV caches when it starts, and this machine has "
        f"{available / 2**30:.1f} GiB of memory available; lower it, or leave it out for what a small model can use"
    )


def check_port_of_service(config: TinkerConfig) -> None:
    """Raises `UserError` if the service could not listen on its address, and its subclass `Obstructed` if the port is in use."""
    try:
        check_port(config.host, config.port)
    except OSError as error:
        raise (UserError if is_permanent(error) else Obstructed)(
            f"tinker.port = {config.port}: {error.strerror}"
        ) from None


def check_backend(config: JobConfig) -> dict[str, Any]:
    """Returns the options of the job's backend.

    Raises `UserError` without Ray or the address of a cluster, and its subclass `Obstructed` if nothing answers there.
    """
    if config.backend == "local":
        return {}
    from counterpoint.cluster.backends.ray_cluster import RayCluster  # for no job on this machine alone

    cluster = RayCluster()
    try:
        cluster.require()
    except BackendError as error:
        raise UserError(f'backend = "ray": {error}') from None
    try:
        cluster.probe()
    except BackendError as error:
        raise Obstructed(f'backend = "ray": {error}') from None
    return {"address": cluster.address}


def check_imports(
    runs: Sequence[RunConfig], *, calls_parsed: bool = True, allowed: Collection[str] | None = None
) -> None:
    """Loads everything that is named by import path in a child process, within `CHECK_SECONDS`. `calls_parsed` as in `check_run`.

    `allowed` are the paths that a guest may name: the child then loads its built-in kinds, too, whose arguments may have others.
    Raises as `check_run`.
    """
    custom = [kind for run in runs for kind in import_paths(run)]
    if not custom and allowed is None:
        return
    given = b"\n".join(run.model_dump_json().encode() for run in runs)
    arguments = [] if calls_parsed else [_UNPARSED]
    names = ", ".join(dict.fromkeys(custom or [run.run_id for run in runs]))
    load_in_child(names, "counterpoint.job.check", arguments, given, {} if allowed is None else variable_of(allowed))


def load_in_child(
    names: str,
    module: str,
    arguments: Sequence[str],
    given: bytes = b"",
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Has `module` load, in a process of its own and within `CHECK_SECONDS`, what is named by import paths.

    Raises `UserError` with what the child writes into `own_answer` before it ends with the code of that or of its subclass
    `Obstructed`, which is raised then.
    """
    print(f"checking {names}", file=sys.stderr, flush=True)
    code, said = in_child(["-m", module, *arguments], given, variables)
    if code is None:
        raise UserError(
            f"{names}: not loaded within {CHECK_SECONDS:.0f} s, as if a module waits while it is imported; "
            "expected imports that only define things"
        )
    if code == UserError.code:
        raise UserError(said)
    if code == Obstructed.code and said:
        raise Obstructed(said)
    if code != 0:
        raise UserError(f"{names}: the process that loaded it {describe_exit(code)}")


@contextmanager
def own_answer() -> Iterator[TextIO]:
    """Yields the child's standard output. What a module prints while it is imported does not get there."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        yield answer


def import_paths(run: RunConfig) -> list[str]:
    """Returns what a run names by import path."""
    kinds = [*(environment.kind for environment, _ in run.every_environment.values()), run.advantage.kind]
    return [kind for kind in [*kinds, run.training.loss.kind] if ":" in kind]


def in_child(words: Sequence[str], given: bytes, variables: Mapping[str, str]) -> tuple[int | None, str]:
    """Runs Python with `words` in a process of its own, within `CHECK_SECONDS`.

    Returns its exit code, None if it did not end in time and was killed; and what it wrote into `own_answer`.
    """
    command, environment = [sys.executable, "-P", *words], {**os.environ, **SAFE_PATH, **variables}
    try:
        done = child.run(words[1], command, CHECK_SECONDS, environment=environment, given=given, stderr=None)
    except TimeoutError:
        return None, ""
    return done.code, done.output.decode()


def main() -> int:
    """Runs the child: loads everything that is named by the configurations on standard input, which has one per line.

    Its standard output is the error, if there is one.
    """
    runs = [RunConfig.model_validate_json(line) for line in sys.stdin.buffer]
    forget_environment()
    with own_answer() as answer:
        for run in runs:
            try:
                _load_all(run, calls_parsed=_UNPARSED not in sys.argv)
            except ValueError as error:
                answer.write(f"{f'run {run.run_id!r}: ' if len(runs) > 1 else ''}{error}")
                return Obstructed.code if is_passing(error) else UserError.code
    return 0


def _load_all(run: RunConfig, calls_parsed: bool) -> None:
    from counterpoint.orchestrator.step.advantages import load_advantage, try_advantage

    for place, (environment, _) in run.every_environment.items():
        try:
            _load_environment(environment, run.model, calls_parsed)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    try_advantage(load_advantage(run.advantage, run.training.loss), run.schedule.group_size)
    if ":" in run.training.loss.kind:
        from counterpoint.trainer.losses.load import load_loss  # torch comes with it, which takes seconds
        from counterpoint.trainer.updates.passes import optional_inputs

        load_loss(run.training.loss, optional_inputs(run))


def _load_environment(config: EnvironmentConfig, model: str, calls_parsed: bool) -> None:
    from counterpoint.environments.lifecycle import check_chat
    from counterpoint.environments.registry import load_here

    environment = load_here(config)
    if not getattr(environment, "needs_tool_parser", False):
        return
    if not calls_parsed:
        raise ValueError(
            f"environment {config.name!r}: kind = {config.kind!r} has tools, and no server of this job parses calls of them; "
            "expected inference.tool_parser, the way in which the model writes calls, such as 'hermes' (Qwen2.5, Qwen3, the "
            "built-in models)"
        )
    if (Path(model) / "tokenizer.json").is_file():
        from counterpoint.environments.chat import Chat

        check_chat(config.name, environment, Chat(model))


if __name__ == "__main__":
    sys.exit(main())
