"""The cases of `python -m perf.bench`, and how one is measured: in a process of its own, with memory and threads of its own.

So no case inherits another's memory or threads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from counterpoint.transport.process.child import run
from perf.bench.command import Size
from perf.figures import Case
from perf.noise import TOO_NOISY, settle

CASES = {
    "step": "the step boundary, beside an idle loop, and a copy and a write of its bytes",
    "turn-rewards": "the step boundary with 64 turns a rollout, without and with rewards of turns",
    "receipts": "the step boundary with receipts, and without",
    "send": "the sender, beside a bare ZMQ loop",
    "receive": "64 responses of 8 MB, beside a bare socket read",
    "schedule": "1,024 rollouts in flight (4,096 in full), beside the same loop with the openai client",
    "fleet": "16 servers in a daemon's pool, 256 in full, with many names of weights, failures and updates; then two daemons",
    "samples": "512 and 2,000 samples at once by the Tinker SDK, through the service",
    "contributions": "training by the Tinker SDK through the service, beside the trainer's own wire, and a loss of one pass",
    "memory": "peak and growth of resident size",
    "multi-run": "training four runs at once, and many tiny ones, beside one with the same load; their names at servers",
}
"""The cases by what they measure. They take five minutes on two quiet cores where all bounds hold."""


class CaseFailed(RuntimeError):
    """A case ended without figures. It has printed its errors on standard error."""


def measure_case(name: str, size: Size) -> list[Case]:
    """Measures the case `name`, once the machine has settled from the one before. Raises `CaseFailed`."""
    settle()
    command = [sys.executable, "-P", "-m", module_of(name), "--json", *size.flags]
    completed = run(f"the case {name}", command, stderr=None)
    try:
        return [Case.of_json(fields) for fields in json.loads(completed.output)]
    except (ValueError, KeyError):
        raise CaseFailed(f"the case {name} ended with {completed.code} and no figures") from None


def module_of(name: str) -> str:
    """Returns the module that measures a case."""
    return f"perf.bench.{name.replace('-', '_')}"


def undecided(cases: Sequence[Case]) -> tuple[float, list[str]]:
    """Returns what made figures too noisy to judge.

    The largest noise (share of the machine's CPU, 0 to 1) of cases with such figures, if other processes took too much, else 0;
    and the figures that are too noisy by themselves, as `case: figure`.
    """
    noisy = [(case, figure) for case in cases for figure in case.figures if case.verdict(figure) == "too noisy"]
    noise = max((case.noise or 0.0 for case, _ in noisy), default=0.0)
    calm = [f"{case.name}: {figure.name}" for case, figure in noisy if (case.noise or 0.0) <= TOO_NOISY]
    return (noise if noise > TOO_NOISY else 0.0), calm
