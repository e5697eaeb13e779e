"""The tables of `counterpoint plan --speed` and of `counterpoint plan DIRECTORY`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from counterpoint.orchestrator.scheduling import lossless

if TYPE_CHECKING:
    from counterpoint.job.plan.measured import Measured
    from counterpoint.job.plan.speed import Speed
    from counterpoint.job.plan.speed_plan import SpeedPlan


def show_speed(console: Console, plan: SpeedPlan) -> None:
    """Prints what is predicted of a job's own division of the cards and of the best one."""
    table = Table(title="predicted" if plan.corrections else "the least that it can take: nothing is measured")
    columns = ("cards", "trainer s", "tokens/s", "idle", "servers s", "tokens/s", "idle", "step s", "staleness")
    for name in columns:
        table.add_column(name, justify="left" if name == "cards" else "right")
    for name, speed in (("as configured", plan.own), ("the best division", plan.best)):
        if speed is not None:
            table.add_row(*_row(name, speed))
    console.print(table)
    if plan.corrections is not None:
        console.print(
            f"corrected by the measured job: trainer {plan.corrections.trainer:.3g} and servers {plan.corrections.servers:.3g} "
            f"times the least time, and a step has {plan.corrections.publishing:.3g} s of publishing and "
            f"{plan.corrections.pause:.3g} s of loads and boundary",
            soft_wrap=True,
        )
    price = "" if plan.price is None else f", which cost {plan.price:,.2f}"
    console.print(
        f"{plan.steps} steps: {plan.hours:.3g} hours on {plan.cards} cards, {plan.hours * plan.cards:.3g} card hours{price}",
        soft_wrap=True,
    )


def _row(name: str, speed: Speed) -> list[str]:
    return [
        f"{name}: trainer {speed.ranks}, servers {speed.replicas}",
        f"{speed.trainer:.3g}",
        f"{speed.trainer_tokens:,.0f}",
        f"{speed.trainer_idle:.0%}",
        f"{speed.servers:.3g}",
        f"{speed.server_tokens:,.0f}",
        f"{speed.servers_idle:.0%}",
        f"{speed.wall:.3g}",
        f"{speed.staleness:.2f}",
    ]


def show_measured(console: Console, found: Measured) -> None:
    """Prints the newest steps of a job: seconds, who waits, and which bound on staleness loses nothing."""
    rollouts = found.rollouts
    lines = [
        f"a step takes {found.wall:.3g} s: the trainer trains {found.trainer:.3g} s and publishes {found.publishing:.3g} s, the "
        f"servers generate {found.servers:.3g} s; {found.pause:.3g} s are loads and the boundary",
        f"a rollout has {rollouts.prompt:.0f} prompt and {rollouts.completion:.0f} completion tokens; {rollouts.played:.2f} are "
        "played for one that is trained",
        found.advice or "neither trainer nor servers wait for long",
        f"staleness is {found.staleness:.2f}",
    ]
    newest = found.shipped[-1]
    if (bound := newest.get(lossless.BOUND)) is not None:
        lines[-1] += f"; no rollout is too old with schedule.max_off_policy_steps = {bound:.0f}"
        lines += [words] if (words := lossless.in_words(newest)) else []
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
