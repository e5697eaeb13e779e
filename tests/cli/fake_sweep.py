"""A program for the tests: `counterpoint sweep` whose runs only pretend (`tests/cli/fake_orchestrator.py`).

`python -m tests.cli.fake_sweep BEHAVIOUR FILE [ARGUMENTS]`; a target's own behaviour may be named: `hang,seed-2=fail`.
"""

from __future__ import annotations

import sys

import counterpoint.job.sweep.submit_workers
import counterpoint.job.sweep.target_process
from counterpoint.job.sweep.targets import Target
from counterpoint.run.config import RunConfig


def pretended(target: Target) -> list[str]:
    named = dict(word.split("=") for word in behaviour.split(",") if "=" in word)
    program = [sys.executable, "-m", "tests.cli.fake_orchestrator", str(target.output_dir), str(target.run_id)]
    return [*program, named.get(target.target_id, behaviour.partition(",")[0]), "--resume"]


def has_all_steps(run: RunConfig) -> bool:
    return (run.run_dir / "metrics.jsonl").read_text().count("\n") == run.steps


if __name__ == "__main__":
    behaviour = sys.argv[1]
    Target.command = property(pretended)  # type: ignore[assignment]
    counterpoint.job.sweep.target_process.is_finished = has_all_steps  # type: ignore[attr-defined]
    counterpoint.job.sweep.submit_workers.SWEEP = (sys.executable, "-m", "tests.cli.fake_sweep", behaviour)
    from counterpoint.cli.main import main

    sys.exit(main(["sweep", *sys.argv[2:]]))
