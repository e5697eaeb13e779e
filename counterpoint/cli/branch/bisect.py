"""`counterpoint bisect RUN --good A --bad B`: which rollout made a metric go bad, by branches that leave rollouts out."""

from __future__ import annotations

import argparse

from counterpoint.cli.arguments.job import add_job, job_of
from counterpoint.cli.branch.branch import removal_of, step_of
from counterpoint.job.branch import bisect
from counterpoint.transport.printable import printable
from counterpoint.transport.process.stop_requests import interrupted_in_order


def main(arguments: list[str]) -> int:
    """Runs the command. Raises `UserError`."""
    given = _parser().parse_args(arguments)
    job = job_of(given)
    plan = bisect.plan(job, given.run, given.metric, given.good, given.bad, given.steps)
    print(printable(str(plan)), flush=True)
    if not given.start:
        print("--start begins it")
        return 0
    with interrupted_in_order():
        found = bisect.carry_out(plan, lambda said: print(printable(said), flush=True)).rollouts
    print(printable(removal_of(job, bisect.branches_of(job, given.run))))
    if not found:
        print(f"no one rollout was found: several made {plan.metric} go bad together, or none of these did")
        return 1
    what = f"rollout {found[0]}" if len(found) == 1 else f"one of {len(found)} rollouts, {', '.join(found)},"
    print(printable(f"{what} made {plan.metric} go bad: a branch without it is good"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint bisect",
        description="Finds the rollout that made a metric go bad. Says which steps may have done it and how many branches that "
        f"takes, at most {bisect.MOST_BRANCHES}; with --start it plays them, one after the other, in the live job. The same call "
        "again goes on with a bisection that was interrupted. Exit code 0: found, or only planned; 1: not one rollout alone; 2: "
        "a wrong call, or a branch that could not go on; 3: the steps were not kept.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="the run")
    parser.add_argument("--metric", default="reward/mean", help="of its metrics.jsonl (default: %(default)s)")
    parser.add_argument("--good", type=step_of, required=True, metavar="STEP", help="a step at which it was good")
    parser.add_argument("--bad", type=step_of, required=True, metavar="STEP", help="a later step at which it was bad")
    parser.add_argument(
        "--steps", type=step_of, default=1, metavar="N", help="steps that each branch plays (default: 1)"
    )
    parser.add_argument("--start", action="store_true", help="begin the branches")
    add_job(parser)
    return parser
