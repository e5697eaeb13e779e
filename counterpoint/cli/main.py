"""`counterpoint`: the entry point. It has the commands' names; a command's module is imported when the command is given."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType

from counterpoint.job.admin.verbs import RUN_VERBS
from counterpoint.transport.errors import INTERRUPTED, UserError
from counterpoint.transport.printable import printable
from counterpoint.transport.process.permanent_errors import DISK_FULL, is_disk_full

COMMANDS = {
    "run": ("counterpoint.cli.run", "run a whole job, inference, trainer and orchestrators, from one file"),
    "orchestrator": ("counterpoint.cli.orchestrator", "run one orchestrator, alone or in a live job"),
    "trainer": ("counterpoint.cli.trainer", "run the trainer, alone"),
    "tinker": ("counterpoint.cli.tinker:tinker", "run a job whose runs are trained by clients of the Tinker SDK"),
    "service": ("counterpoint.cli.tinker:service", "run the service for the Tinker SDK, alone"),
    "sft": ("counterpoint.cli.sft", "train a model on conversations, to begin a run with or alone"),
    "inference": ("counterpoint.cli.inference", "run one vLLM server with our plugin, alone"),
    "eval": ("counterpoint.cli.eval", "play a file's evaluations on a checkpoint, a running server or the base model"),
    "make-model": ("counterpoint.cli.prepare.make_model", "build a tiny model, or find one, and print its directory"),
    "sweep": (
        "counterpoint.cli.sweep",
        "run one of any number of workers over a grid of runs or jobs, or submit them; `sweep status` shows it",
    ),
    "tune": (
        "counterpoint.cli.tune.tune",
        "search over trials, processes or runs of a live job; `tune status`, `tune resume`",
    ),
    "submit": (
        "counterpoint.cli.cluster.submit",
        "run a job of roles of your own, from one file; --detach returns at once",
    ),
    "wait": ("counterpoint.cli.cluster.wait", "wait for the end of a submitted job; its exit code is the job's"),
    "env": (
        "counterpoint.cli.environment",
        "`env check` plays an environment alone and says what would break; `env new` writes one",
    ),
    "replay": (
        "counterpoint.cli.dumps.replay:replay",
        "run the step boundary over a dump, and measure its phases and the event loop's lag",
    ),
    "attribute": (
        "counterpoint.cli.dumps.replay:attribute",
        "measure which phases of the step boundary block the event loop",
    ),
    "synthesize": ("counterpoint.cli.dumps.write:synthesize", "make up a dump of any size, to replay"),
    "import-dump": (
        "counterpoint.cli.dumps.write:import_dump",
        "make a dump of the reference system's pickled rollouts",
    ),
    "stop": ("counterpoint.cli.stop", "end one run of a job, or evict it; the others go on; or end a submitted job"),
    "track": (
        "counterpoint.cli.track",
        "send a job's metrics to TensorBoard, Trackio or W&B, while it runs or afterwards",
    ),
    **{verb.name: ("counterpoint.cli.steering:run_verb", verb.summary) for verb in RUN_VERBS if verb.is_command},
    "join": ("counterpoint.cli.steering:join", "start a run of its own in a live job, detached"),
    "servers": ("counterpoint.cli.steering:servers", "list, drain and add the inference servers of a live job"),
    "status": (
        "counterpoint.cli.status",
        "print a job's state from its directory; --watch repeats it, --json is for programs",
    ),
    "serve": ("counterpoint.cli.serve", "serve the web page and the admin API of jobs, from their directories"),
    "show": ("counterpoint.cli.show", "print the prompts, completions and rewards of a step's rollouts"),
    "verify": (
        "counterpoint.cli.receipts.verify",
        "check a run against its receipts: nothing missing, doubled, reordered or altered",
    ),
    "bisect": (
        "counterpoint.cli.branch.bisect",
        "find the rollout that made a metric of a run go bad, by branches without some",
    ),
    "branch": ("counterpoint.cli.branch.branch", "go on from a kept step of a run as another run, with other keys"),
    "mismatch": (
        "counterpoint.cli.receipts.mismatch",
        "split a step's mismatch between servers and trainer: staleness, precision, kernels, faults",
    ),
    "try": ("counterpoint.cli.branch.trial", "try a change inside a run: two branches, compared on held-out examples"),
    "logs": ("counterpoint.cli.logs", "print the end of a run's or role's log; --follow prints new lines"),
    "metrics": ("counterpoint.cli.metrics", "print every metric's names and meaning, or those that have a word"),
    "plan": ("counterpoint.cli.plan", "predict the memory of a job on given GPUs by part, and what would fit"),
    "keys": (
        "counterpoint.cli.prepare.keys",
        "make the keys and the token of a job whose roles are on several machines",
    ),
    "completion": ("counterpoint.cli.prepare.completion", "print a completion script for bash, zsh or fish"),
}

BAD_CONFIGURATION = 2


def usage() -> str:
    """Returns the text of `counterpoint --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: counterpoint COMMAND [ARGUMENTS]",
            "",
            "Trains language models by reinforcement learning; its event loop never stalls.",
            "",
            "commands:",
            *lines,
            "",
            "A command that takes a TOML file takes --section.key VALUE for each of its keys, too, and --dry-run, which",
            "prints the resolved configuration. Flags override COUNTERPOINT_SECTION__KEY variables, which override the file.",
            "`counterpoint COMMAND --help` lists the sections, `counterpoint COMMAND --help SECTION` the keys of one.",
            "`counterpoint --version` prints the version.",
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the process's exit code. `arguments` are those of the process unless given."""
    words = sys.argv[1:] if arguments is None else arguments
    if os.getpid() == 1:  # of a container
        from counterpoint.transport.process.first_process import stay_behind_as_first

        stay_behind_as_first()
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            print(usage(), flush=True)
            return 0 if words else BAD_CONFIGURATION
        if words[0] == "--version":
            from importlib.metadata import version

            print(f"counterpoint {version('counterpoint')}")
            return 0
        name, rest = words[0], words[1:]
        if name not in COMMANDS:
            raise UserError(_unknown_command(name))
        from counterpoint.transport.process.imports import with_room

        return with_room(_run, name, rest)
    except UserError as error:
        _print_error(printable(str(error)))
        return error.code
    except KeyboardInterrupt as interruption:
        if message := str(interruption):
            print(f"\ncounterpoint: {message}", file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        from counterpoint.transport.process.extras import explained

        if (lacks := explained(error)) is None:
            raise
        _print_error(str(lacks))
        return lacks.code
    except BrokenPipeError:  # the reader of our output has gone (`counterpoint run --help | head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit would fail as well
        return 1
    except OSError as error:  # such as a full disk: the message names the file, and a traceback adds nothing
        _print_error(printable(str(error)))
        return DISK_FULL if is_disk_full(error) else 1
    except Exception as error:
        from counterpoint.transport.process.notify import notify_failure

        notify_failure(f"{type(error).__name__}: {error}")
        raise


def _print_error(message: str) -> None:
    import logging

    from counterpoint.transport.process.journal import prioritized
    from counterpoint.transport.process.notify import notify_failure

    print(prioritized(f"counterpoint: error: {message}", logging.ERROR, sys.stderr), file=sys.stderr)
    notify_failure(message)


def _run(name: str, rest: list[str]) -> int:
    return command_of(name)(rest)


def command_of(name: str) -> Callable[[list[str]], int]:
    """Returns the function of a command: `main` of its module, or what `COMMANDS` names behind a colon."""
    module, _, function = COMMANDS[name][0].partition(":")
    found = getattr(_module(module), function or "main")
    return partial(found, name) if function == "run_verb" else found


def _module(name: str) -> ModuleType:
    if name in sys.modules:
        return sys.modules[name]
    from counterpoint.transport.process.imports import ended_by_interrupt, without_gc

    with ended_by_interrupt(), without_gc():
        return importlib.import_module(name)


def _unknown_command(name: str) -> str:
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    advice = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
    return f"there is no command {name!r}; {advice}"


if __name__ == "__main__":
    exit_code = main()
    if "torch" in sys.modules:
        from counterpoint.transport.process.ending import end_at_once

        end_at_once(exit_code, wait_for_threads=True)
    sys.exit(exit_code)
