"""The cases of `counterpoint bench`, and how one is measured: in a process of its own, with memory and threads of its own.

So no case inherits another's memory or threads. Chaos is not among them: it measures no speed, takes most of an hour, and
has its own arguments.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from perf.bench.command import Size
from perf.figures import Case
from perf.noise import TOO_NOISY, settle
from transport.process.launch import guarded

GROUPS = {
    "daemon": {
        "step": "the step boundary, beside an idle loop, a copy and a write of its bytes, and the plain path",
        "send": "the sender, beside a bare ZMQ loop",
        "receive": "64 responses of 8 MB, beside a bare socket read",
        "schedule": "1,024 rollouts in flight (4,096 in full), beside the same loop with the openai client",
        "events": "the scheduler's time for an event, with 100 to 10,000 groups in progress",
        "garbage": "memory and pauses with an environment that makes reference cycles, beside Python's defaults",
        "memory": "peak and growth of resident size",
        "scaling": "from 0.1 to 1 GB (4 GB in full)",
    },
    "environments": {
        "env-workers": "4,096 sessions of an environment in 8 workers, beside the same in the loop",
        "evaluation": "training rollouts a second beside an evaluation with a share of 0.2, beside the same without",
    },
    "train": {
        "multi-run": "training four runs at once, beside one with the same load, and the memory of each",
        "train-memory": "activations of a training pass at 0.6B shapes, beside whole logits without checkpointing",
        "train-compiled": "CPU time of a training row with compiled layers, beside the same without",
    },
    "cluster": {
        "cluster-manager": "the controller's time for an event and a heartbeat, with 10 to 10,000 workers",
        "cluster-detection": "from a worker's death or silence to its event in the journal of the controller",
        "cluster-calls": "calls from one worker to another, beside those of an actor of Ray and a bare ZMQ echo",
        "cluster-channel": "records of 1 KB through a channel, beside Ray's queue, and of 8 MB, beside bare ZMQ",
        "sweep": "claims a second of eight workers, beside bare flushed files; status of 10,000 targets",
    },
    "tune": {
        "tune-trials": "a trial that does nothing, in a process of its own, beside Ray Tune; ten times as many",
        "tune-population": "training a population of eight at once, beside one run with the same load; the memory of each",
        "tune-runner": "the tuner's loop: CPU time for a result, with 10 to 10,000 trials",
    },
    "serve": {
        "serve-viewers": "the loop's lag beside 100 viewers of the page, beside the same without them",
        "serve-scale": "the page's overview and curves of 1,000 runs of 10,000 steps: seconds and memory",
    },
}
"""The cases by what they measure. Each group takes less than five minutes on two quiet cores where all bounds hold."""

DEFAULT_GROUP = "daemon"
"""What is measured where nothing is named."""

CASES = {name: summary for group in GROUPS.values() for name, summary in group.items()}

ALONE = {
    "chaos": "kill processes of a real job of several runs, round after round, and audit what is left (many minutes)",
    "tune-chaos": "kill the runner, the fork server or a trial of experiments, and audit what each left (many minutes)",
    "gateway-fuzz": "hostile requests to the gateway for agents: what they are answered, and memory (many minutes)",
    "cluster-chaos": "the same for the controller: processes, nodes and disks of jobs of many roles (many minutes)",
}
"""What measures no speed, and is run only when it is named."""


ALL = "all"
"""The name of all groups."""


class UnknownCase(ValueError):
    """A name that is neither of a case nor of a group. The message lists those."""


def named_cases(names: Sequence[str]) -> list[str]:
    """Returns the cases with these names, or of the groups with these, each once; none: the default group's.

    Raises `UnknownCase`.
    """
    cases: list[str] = []
    for name in names or [DEFAULT_GROUP]:
        if name in CASES:
            cases.append(name)
        elif name == ALL or name in GROUPS:
            cases += CASES if name == ALL else GROUPS[name]
        else:
            known = f"the cases are {', '.join(CASES)}; groups of them are {', '.join(GROUPS)} and {ALL}"
            raise UnknownCase(f"there is no case {name!r}; {known}")
    return list(dict.fromkeys(cases))


class CaseFailed(RuntimeError):
    """A case ended without figures. It has printed its errors on standard error."""


def measure_case(name: str, size: Size) -> list[Case]:
    """Measures the case `name`, once the machine has settled from the one before. Raises `CaseFailed`."""
    settle()
    command = [sys.executable, "-P", "-m", module_of(name), "--json", *size.flags]
    completed = subprocess.run(guarded(command), stdout=subprocess.PIPE, text=True, check=False)
    try:
        return [Case.of_json(fields) for fields in json.loads(completed.stdout)]
    except (ValueError, KeyError):
        raise CaseFailed(f"the case {name} ended with {completed.returncode} and no figures") from None


def run_alone(name: str, arguments: Sequence[str]) -> int:
    """Runs one of `ALONE` with its own arguments; returns its exit code."""
    return subprocess.run(guarded([sys.executable, "-P", "-m", module_of(name), *arguments]), check=False).returncode


def module_of(name: str) -> str:
    """Returns the module that measures a case."""
    for folder in ("cluster", "tune", "train", "serve"):
        name = name.replace(f"{folder}-", f"{folder}.")
    return f"perf.bench.{name.replace('-', '_')}"


def undecided(cases: Sequence[Case]) -> tuple[float, list[str]]:
    """Returns what made figures too noisy to judge.

    The largest noise (share of the machine's CPU, 0 to 1) of cases with such figures, if other processes took too much, else 0;
    and the figures that are too noisy by themselves, as `case: figure`.
    """
    noisy = [(case, figure) for case in cases for figure in case.figures if case.verdict(figure) == "too noisy"]
    noise = max((case.noise for case, _ in noisy if case.noise > TOO_NOISY), default=0.0)
    return noise, [f"{case.name}: {figure.name}" for case, figure in noisy if case.noise <= TOO_NOISY]
