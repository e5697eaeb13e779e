"""`make demo-cluster`: the programs in `examples/`, as jobs of the cluster controller whose processes are killed while they work.

    python -m perf.demos.demo_cluster [EXAMPLE ...] [--backend local|ray] [--output_dir DIRECTORY]

Each kill is a SIGKILL of a worker's own process, or of the job's master; one worker is stopped by SIGSTOP instead. For each
example it checks that the job ends as it would have without. The exit code is 0 if all claims hold, 1 if not. With
`--backend ray` it starts a Ray cluster of two nodes on this machine and runs the same there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from rich import box
from rich.console import Console
from rich.table import Table

from counterpoint.cluster import ClusterError
from perf.commands import DemoError
from perf.demos import cluster_examples
from perf.demos.cluster_examples import Result
from perf.demos.disturbed_job import Place

EXAMPLES = {
    "ppo": cluster_examples.ppo,
    "pipeline": cluster_examples.pipeline,
    "elastic_training": cluster_examples.elastic_training,
}

WIDTH = 130
"""The width of the table where output is no terminal."""

RAY_NODE = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}


def main(arguments: list[str] | None = None) -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m perf.demos.demo_cluster", allow_abbrev=False)
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", help=f"of {', '.join(EXAMPLES)}; all without")
    parser.add_argument("--backend", choices=("local", "ray"), default="local")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/demo-cluster"))
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.examples if name not in EXAMPLES]:
        parser.error(f"no such example: {', '.join(unknown)}; there are {', '.join(EXAMPLES)}")
    directory = given.output_dir.resolve() / time.strftime("%m%d-%H%M%S")
    console = Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    try:
        with place_of(given.backend, console) as place:
            results = {
                name: result_of(name, directory / name, place, console) for name in given.examples or tuple(EXAMPLES)
            }
    except KeyboardInterrupt:
        return 130
    return verdict(results, console)


@contextmanager
def place_of(backend: str, console: Console) -> Iterator[Place]:
    """Yields where the jobs run; a Ray cluster lives as long as the block."""
    if backend == "local":
        yield Place("local")
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    console.print("── a Ray cluster of two nodes starts on this machine", style="bold")
    cluster = Cluster(initialize_head=True, head_node_args=RAY_NODE)
    try:
        cluster.add_node(**RAY_NODE)
        yield Place("ray", {"address": cluster.address})
    finally:
        cluster.shutdown()


def result_of(name: str, directory: Path, place: Place, console: Console) -> Result:
    """Runs one example; whatever keeps it from its end is its flaw."""
    console.print(f"── {name}, on {place.backend}: {directory}", style="bold")
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:6.1f} s  {text}", markup=False)

    example: Callable[[Path, Place, Callable[[str], None]], Result] = EXAMPLES[name]
    try:
        result = example(directory, place, say)
    except (DemoError, ClusterError) as error:
        result = Result([], "", [str(error)])
    say("ended")
    return result


def verdict(results: dict[str, Result], console: Console) -> int:
    """Shows the results and whether the claims hold; returns the exit code."""
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("example", "role", "kills", "back after, median", "longest"):
        table.add_column(column, justify="left" if column in ("example", "role") else "right")
    for name, result in results.items():
        for role in dict.fromkeys(kill.role for kill in result.kills):
            seconds = [kill.seconds for kill in result.kills if kill.role == role]
            table.add_row(name, role, str(len(seconds)), f"{median(seconds):.1f} s", f"{max(seconds):.1f} s")
    console.print()
    console.print(table)
    flawed = False
    for name, result in results.items():
        flaws = [flaw for flaw in result.flaws if flaw]
        for flaw in flaws:
            console.print(f"✗ {name}: {flaw}", style="red", markup=False)
        if not flaws:
            console.print(f"✓ {name}: {len(result.kills)} kills; {result.claim}", style="green", markup=False)
        flawed = flawed or bool(flaws)
    return 1 if flawed else 0


if __name__ == "__main__":
    sys.exit(main())
