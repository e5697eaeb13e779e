"""Plays streams against both sides and compares. Exit code 1 at the first stream with different decisions, which is shown."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from typing import Any

from tests.tune.schedulers.differential.ours import OurSide
from tests.tune.schedulers.differential.rays import RaySide
from tests.tune.schedulers.differential.scenario import SCHEDULERS, scenario
from tests.tune.schedulers.differential.world import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=10_000, help="in all, shared among the schedulers")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--scheduler", choices=SCHEDULERS, action="append", help="only these")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    names = options.scheduler or SCHEDULERS
    for name in names:
        counts: Counter[str] = Counter()
        for seed in range(options.first, options.first + options.streams // len(names)):
            counts.update(compare(name, seed))
        print(f"{name}: the same decisions in {dict(sorted(counts.items()))}")


def compare(name: str, seed: int) -> Counter[str]:
    """Plays one stream on both sides; counts it, its decisions, and where Ray hangs."""
    stream = scenario(name, seed)
    rays = play(RaySide, stream)
    ours = play(OurSide, stream)
    hangs = bool(rays) and rays[-1][0] == "hang"
    if hangs:
        rays = rays[:-1]
        ours = ours[: len(rays)]
    if rays != ours:
        show_difference(stream, rays, ours)
        sys.exit(1)
    kinds = Counter(f"{kind}s" for kind, *_ in rays if kind in ("result", "stopped"))
    requests = Counter(request[0] for entry in rays for request in entry[-1])
    counts = Counter(streams=1, plain_streams=int(stream.plain), ends_where_ray_hangs=int(hangs))
    return counts + kinds + Counter({f"{name}_requests": count for name, count in requests.items()})


def play(side: Any, stream: Any) -> list[tuple[Any, ...]]:
    world = World(stream)
    return world.play(side(stream, world))


def show_difference(stream: Any, rays: list[Any], ours: list[Any]) -> None:
    print(stream)
    for place in range(max(len(rays), len(ours))):
        ray, our = (log[place] if place < len(log) else None for log in (rays, ours))
        if ray != our:
            print(f"decision {place}\n  Ray:  {ray}\n  ours: {our}\nbefore:")
            print(*(f"  {entry}" for entry in rays[max(0, place - 12) : place]), sep="\n")
            return


main()
