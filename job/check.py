"""What can be known to be wrong with a run before anything starts: its environments, its advantage, its loss.

What is built in is looked at here. What an operator names by import path is loaded by a child, `python -m job.check`, as the role
will load it: none of its code runs in `counterpoint run` itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from cluster.events import describe_exit
from cluster.process import guarded
from job.configuration.layers import forget_environment
from job.errors import UserError
from run.config import RunConfig

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Of every role's environment: keeps Python from taking a `cli/` or `trainer/` in the directory we happen to stand in for our
packages. So an operator's module has to be on PYTHONPATH, wherever one stands."""

BUILT_IN_LOSS = "importance_ratio"

CHECK_SECONDS = 60.0
"""For loading everything that is named by import path. The slowest is torch from a cold disk; a module that takes longer most
likely waits for something."""


def check_run(config: RunConfig) -> None:
    """Raises `UserError` for a built-in environment or advantage that does not exist or refuses its arguments."""
    from environments.registry import load_environment
    from orchestrator.step.advantages import load_advantage

    for position, environment in enumerate(config.environments):
        if ":" not in environment.kind:
            try:
                load_environment(environment)
            except ValueError as error:
                raise UserError(f"environments[{position}]: {error}") from None
    if ":" not in config.advantage.kind:
        try:
            load_advantage(config.advantage)
        except ValueError as error:
            raise UserError(str(error)) from None


def check_templates(runs: Sequence[RunConfig]) -> None:
    """Raises `UserError` for `chat_template_kwargs` that the chat template of a run's model, a directory by now, never reads."""
    for run in runs:
        for environment in run.environments:
            if kwargs := run.sampling_of(environment).chat_template_kwargs:
                from environments.chat import Chat

                try:
                    Chat(run.model).with_template_kwargs(kwargs)
                except ValueError as error:
                    raise UserError(f"run {run.run_id}, environment {environment.name}: {error}") from None


def check_imports(runs: Sequence[RunConfig]) -> None:
    """Loads what is named by import path in a child process, within `CHECK_SECONDS`. Raises `UserError`, or `SystemExit` once the
    child has said why."""
    custom = [kind for run in runs for kind in _kinds(run) if ":" in kind]
    custom += [run.training.loss.kind for run in runs if run.training.loss.kind != BUILT_IN_LOSS]
    if not custom:
        return
    names = ", ".join(dict.fromkeys(custom))
    print(f"checking {names}", file=sys.stderr, flush=True)
    code = _load_in_child(runs)
    if code is None:
        raise UserError(
            f"{names}: not loaded within {CHECK_SECONDS:.0f} s, as a module that waits while it is imported; "
            "expected an import that defines things, and waits for nothing"
        )
    if code == 2:
        raise SystemExit(2)
    if code != 0:
        raise UserError(f"{names}: the process that loaded it {describe_exit(code)}")


def _kinds(run: RunConfig) -> list[str]:
    return [*(environment.kind for environment in run.environments), run.advantage.kind]


def _load_in_child(runs: Sequence[RunConfig]) -> int | None:
    """The child's exit code, None where it did not end in time and was killed."""
    command = guarded([sys.executable, "-P", "-m", "job.check"])
    environment = os.environ | SAFE_PATH
    given = b"\n".join(run.model_dump_json().encode() for run in runs)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment) as child:
        try:
            child.communicate(given, timeout=CHECK_SECONDS)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGHUP)  # makes the guardian kill all that is below it
            child.wait()
            return None
    return child.returncode


def main() -> int:
    """The child: loads everything that the configurations on standard input name, one a line."""
    runs = [RunConfig.model_validate_json(line) for line in sys.stdin.buffer]
    forget_environment()
    for run in runs:
        try:
            _load_all(run)
        except ValueError as error:
            print(f"counterpoint: error: {f'run {run.run_id!r}: ' if len(runs) > 1 else ''}{error}", file=sys.stderr)
            return 2
    return 0


def _load_all(run: RunConfig) -> None:
    from environments.registry import load_environment
    from orchestrator.step.advantages import load_advantage, try_advantage

    for position, environment in enumerate(run.environments):
        try:
            load_environment(environment)
        except ValueError as error:
            raise ValueError(f"environments[{position}]: {error}") from None
    try_advantage(load_advantage(run.advantage), run.schedule.group_size)
    if run.training.loss.kind != BUILT_IN_LOSS:
        from trainer.loss import load_loss  # torch comes with it, which takes seconds

        load_loss(run.training.loss)


if __name__ == "__main__":
    sys.exit(main())
