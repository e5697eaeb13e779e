"""One check of nodes: each alone, then pairs of them (`pairs`), then who is abnormal and who slow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from counterpoint.cluster.elastic.crew import CALL_SECONDS, Crew, WorkerId
from counterpoint.cluster.elastic.pairs import PairCheck, stragglers
from counterpoint.cluster.errors import ActorDied, ActorRestarting, CallError

STRAGGLER_RATIO = 0.5
"""A node is a straggler below this share of the median rate."""


@dataclass(slots=True)
class Findings:
    """What a check found."""

    abnormal: dict[WorkerId, str] = field(default_factory=dict)
    """Nodes that failed alone, bad ones, and suspects that nobody could clear, with the reason of each."""
    gone: set[WorkerId] = field(default_factory=set)
    """Workers that died meanwhile; an unfinished test with one of them counts for nobody."""
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    """The rate of each node, alone or in its fastest pair, by the name of the rate; higher is better."""

    def slow_nodes(self) -> list[str]:
        """Returns a line for each rate of a node that is far below the median."""
        return [
            f"{name} is a straggler: its {rate} rate is {share:.0%} of the median"
            for rate, values in sorted(self.rates.items())
            for name, share in sorted(stragglers(values, STRAGGLER_RATIO).items())
        ]


async def check_nodes(crew: Crew, workers: Sequence[WorkerId], check_seconds: float) -> Findings:
    """Checks the nodes of these workers. `check_seconds`: longest time of each test."""
    found, seconds = Findings(), check_seconds + CALL_SECONDS
    named = {worker.name: worker for worker in workers}

    async def ask(worker: WorkerId, method: str, *arguments: Any) -> Any:
        """Returns the answer, or the error that the node's failure is."""
        try:
            return await crew.call(worker, method, *arguments, seconds=seconds)
        except (ActorDied, ActorRestarting) as error:
            found.gone.add(worker)
            return error
        except CallError as error:
            return error

    async def collective(first: WorkerId, second: WorkerId) -> float | CallError:
        """Returns the seconds of a pair's collective, or why it failed."""
        address = await ask(first, "open_pair")
        if isinstance(address, CallError):
            return address
        ranked = enumerate((first, second))
        answers = await asyncio.gather(*(ask(worker, "check_pair", *address, rank) for rank, worker in ranked))
        failed = [answer for answer in answers if isinstance(answer, CallError)]
        return failed[0] if failed else max(map(float, answers))

    for worker, rates in zip(workers, await asyncio.gather(*(ask(w, "do_node_check") for w in workers)), strict=True):
        if isinstance(rates, CallError):
            found.abnormal[worker] = str(rates)
            continue
        for name, rate in rates.items():
            found.rates.setdefault(name, {})[worker.name] = float(rate)
    reasons: dict[str, str] = {}
    pairs = PairCheck(w.name for w in workers if w not in found.abnormal)
    while tests := pairs.next_round():
        results = await asyncio.gather(*(collective(named[first], named[second]) for first, second in tests))
        for worker in found.gone:
            pairs.leave(worker.name)
        for pair, result in zip(tests, results, strict=True):
            pairs.record(pair, None if isinstance(result, CallError) else result)
            if isinstance(result, CallError):
                for name, other in (pair, pair[::-1]):
                    reasons[name] = f"its collective with {other} failed: {result}"
    for name in sorted(pairs.bad):
        found.abnormal[named[name]] = f"{reasons[name]}; the other one is good"
    for name in sorted(pairs.suspects):
        found.abnormal[named[name]] = f"{reasons[name]}; no good node is known to compare with"
    for worker in found.gone:
        found.abnormal.pop(worker, None)
    if len(pairs.seconds) > 2:  # of two nodes each is in the same pair
        found.rates["collective"] = {name: 1 / max(duration, 1e-9) for name, duration in pairs.seconds.items()}
    return found
