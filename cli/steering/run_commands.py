"""The commands that ask something of one run of a live job, over `job/admin/run_requests.py`. Each raises `UserError`.

`change` and `join` have files of their own: they read configurations, whose import takes seconds.
"""

from __future__ import annotations

from cli.arguments.job import job_of
from cli.steering.arguments import parser_of, show
from job.admin.run_requests import (
    DUMP_SECONDS,
    checkpoint_now,
    dump_next_step,
    pause_run,
    profile_loop,
    resume_run,
)


def pause(arguments: list[str]) -> int:
    """`counterpoint pause RUN`: no group of the run starts until `counterpoint resume RUN`."""
    parser = parser_of("pause", "Pauses a run: what is in flight finishes, and nothing starts, over restarts, too.")
    parser.add_argument("--reason", default="", help="why, for people")
    given = parser.parse_args(arguments)
    paused = pause_run(job_of(given), given.run, given.reason)
    return show(given, paused, f"run {paused.run_id} is paused, after step {paused.step}")


def resume(arguments: list[str]) -> int:
    """`counterpoint resume RUN`: a paused run goes on."""
    given = parser_of("resume", "Lets a paused run go on.").parse_args(arguments)
    resumed = resume_run(job_of(given), given.run)
    return show(given, resumed, f"run {resumed.run_id} goes on, after step {resumed.step}")


def checkpoint(arguments: list[str]) -> int:
    """`counterpoint checkpoint RUN`: makes the run's newest step durable now."""
    given = parser_of("checkpoint", "Writes a checkpoint of the newest trained step, and keeps it.").parse_args(
        arguments
    )
    saved = checkpoint_now(job_of(given), given.run)
    return show(given, saved, f"step {saved.step} of run {saved.run_id} is durable: {saved.directory}")


def dump(arguments: list[str]) -> int:
    """`counterpoint dump RUN`: waits for the run's next step, which is written in full for `counterpoint replay`."""
    parser = parser_of("dump", "Has the next step of a run written in full, and waits for it.")
    parser.add_argument("--timeout", type=float, default=DUMP_SECONDS, metavar="SECONDS", help="default: %(default)g")
    given = parser.parse_args(arguments)
    dumped = dump_next_step(job_of(given), given.run, timeout=given.timeout)
    return show(given, dumped, f"step {dumped.step} of run {dumped.run_id}: {dumped.directory}")


def profile(arguments: list[str]) -> int:
    """`counterpoint profile RUN`: samples what the run's event loop does, for a flame graph."""
    parser = parser_of("profile", "Samples the event loop of a run's orchestrator a hundred times a second.")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="N", help="at most 300 (default: %(default)g)")
    given = parser.parse_args(arguments)
    profiled = profile_loop(job_of(given), given.run, given.seconds)
    return show(
        given,
        profiled,
        f"{profiled.seconds:g} s of run {profiled.run_id}\n  for https://www.speedscope.app: {profiled.speedscope}\n"
        f"  for flamegraph.pl: {profiled.collapsed}",
    )
