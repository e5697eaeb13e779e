"""What the reader of the overview does next with a job: a sentence, and the commands."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from counterpoint.job.reading.job_facts import JobFacts


@dataclass(frozen=True, slots=True)
class NextStep:
    """What to do next with one job."""

    text: str
    """A sentence."""
    commands: tuple[str, ...] = ()
    """What to type; empty where the page has what is needed."""


def next_step(facts: JobFacts, errors: int) -> NextStep:
    """Returns what to do next with a job whose runs are trained. `errors`: how many of its problems are errors."""
    directory, has_several = shlex.quote(str(facts.directory)), len(facts.runs) > 1
    played = [run for run in facts.runs if not run.is_fine_tuning]
    if errors:
        return NextStep("The problems above say what to do about each.")
    if not facts.runs:
        start = "No run has begun. One begins with a file that has this directory as its output_dir:"
        return NextStep(start, ("counterpoint run FILE",))
    if facts.running and not any(run.newest for run in facts.runs):
        return NextStep("No step is complete yet. What the first one waits for:", (f"counterpoint status {directory}",))
    if facts.running:
        keys = (f"counterpoint change {run.run_id} --job {directory}" for run in played[:1])
        return NextStep("It trains. The keys that may change meanwhile:" if played else "It trains.", (*keys,))
    if any(run.state != "done" for run in facts.runs):
        again = ("counterpoint run FILE --resume",) if played else ()
        return NextStep("It ended before its last step. It goes on with the command of its start, and --resume:", again)
    looking = [
        run.history.looking_commands(
            facts.directory / "job.toml", has_several, bool(run.history.evaluations.newest) and not run.is_guest
        )  # `eval` knows the runs of the file alone
        for run in played
    ]
    return NextStep("It is done. What it learned:" if played else "It is done.", (*max(looking, key=len, default=()),))
