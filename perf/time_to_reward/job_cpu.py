"""Shows what a job takes, process by process: CPU seconds until its first step, and of each on-policy update after it.

    python -m perf.time_to_reward.job_cpu [--rounds 3] [--updates 12] [--tree DIRECTORY ...] [--json FILE]

The job is ours of the comparison, on-policy. On few cores the processes share them, so the sum of the CPU seconds is the
figure to compare; wall time follows it on a quiet machine. The start ends when the rewards of the first batch are known. With
`--tree`, checkouts take turns, each with its own code: an older commit beside this one, in one run.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tomli_w
from rich import box
from rich.console import Console
from rich.table import Table

from models.make_model import resolve_model
from perf.noise import CpuTimes
from perf.time_to_reward.ours import job_of, records_of
from perf.time_to_reward.settings import TASKS, Settings
from transport.process.launch import descendants

SAMPLE_SECONDS = 0.05
"""Between two looks at the processes; what one takes after its last look is not counted."""

TIMEOUT_SECONDS = 300.0

FIRST_UPDATE = 3
"""The update after which updates are counted: the first ones fill caches and pools."""

_JIFFIES_A_SECOND = os.sysconf("SC_CLK_TCK")

NAMES = {
    "inference.plugin.program": "vLLM",
    "launch.py": "guardians",
    "cli.main inference": "inference",
    "cli.main trainer": "trainer",
    "cli.main orchestrator": "orchestrator",
    "cluster.agent": "agent",
    "cli.main run": "supervisor",
}
"""A part of a command line, and the name of its process; the first that is found counts. What has none of them is "other"."""


@dataclass(slots=True)
class Process:
    """What was seen of the processes of one name."""

    began: float
    """Seconds from the command's start to the first of them."""
    cpu: dict[int, float] = field(default_factory=dict)
    """CPU seconds when so many steps were in the metrics."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One job of one checkout."""

    tree: str
    start: float
    """Seconds from the command to the rewards of the first batch."""
    update: float
    """Seconds of an update."""
    processes: dict[str, Process]
    updates: int
    others: float
    """The share of the machine's CPU that other processes took."""

    def cpu_of_start(self, name: str) -> float:
        """Returns the CPU seconds of the processes of this name until the first step."""
        process = self.processes.get(name)
        return process.cpu.get(1, 0.0) if process else 0.0

    def cpu_of_update(self, name: str) -> float:
        """Returns the CPU seconds of the processes of this name in an update."""
        process = self.processes.get(name)
        if process is None or self.updates <= FIRST_UPDATE:
            return 0.0
        return (process.cpu[self.updates] - process.cpu.get(FIRST_UPDATE, 0.0)) / (self.updates - FIRST_UPDATE)


def measure(tree: Path, model: str, directory: Path, updates: int) -> Measured:
    """Runs a job with the code in `tree` and looks at its processes. Raises `RuntimeError` if it fails."""
    directory.mkdir(parents=True)
    file, job = directory / "job.toml", directory / "job"
    file.write_text(tomli_w.dumps(job_of(Settings(model, updates=updates), job)))
    before, began = CpuTimes.now(), time.time()
    with (directory / "output.log").open("wb") as log:
        command = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "run", str(file)],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            processes = _look(command, job, began, updates)
            after = CpuTimes.now()
            code = command.wait(timeout=TIMEOUT_SECONDS)
        finally:
            command.terminate()
            command.wait(timeout=60)
    records = records_of(job)
    if code != 0 or len(records) < updates:
        end = "\n".join((directory / "output.log").read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"the job of {tree} ended with {code}:\n{end}")
    first = min(FIRST_UPDATE, updates - 1)
    update = (records[-1].at - records[first - 1].at) / (updates - first)
    return Measured(str(tree), records[0].at - began, update, processes, updates, after.share_of_others(before))


def _look(command: subprocess.Popen[bytes], job: Path, began: float, updates: int) -> dict[str, Process]:
    """Looks at the command's processes until all steps are in the metrics, or the command ends."""
    found: dict[str, Process] = {}
    names: dict[int, str] = {}
    cpu: dict[int, float] = {}
    steps = 0
    while command.poll() is None and steps < updates:
        steps = len(records_of(job))
        for pid in (command.pid, *descendants(command.pid)):
            with suppress(OSError):  # it has ended meanwhile
                fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                names[pid] = _name(words) or names.get(pid, "other")
                found.setdefault(names[pid], Process(time.time() - began))
                cpu[pid] = sum(map(int, fields[11:13])) / _JIFFIES_A_SECOND
        for name, process in found.items():
            process.cpu.setdefault(steps, sum(seconds for pid, seconds in cpu.items() if names[pid] == name))
        time.sleep(SAMPLE_SECONDS)
    return found


def _name(words: str) -> str:
    """Returns the name of a process by its command line; vLLM's engine gives itself a title."""
    if words.startswith("VLLM::"):
        return words.split()[0]
    return next((name for part, name in NAMES.items() if part in words), "")


def table(jobs: list[Measured]) -> Table:
    """Returns the medians of each tree's jobs."""
    trees = list(dict.fromkeys(job.tree for job in jobs))
    shown = Table(title="medians: began at; CPU seconds until the first step; of an update", box=box.SIMPLE)
    shown.add_column("")
    for tree in trees:
        shown.add_column(tree, justify="right")
    of_tree = {tree: [job for job in jobs if job.tree == tree] for tree in trees}
    names = list(dict.fromkeys(name for job in jobs for name in job.processes))
    for name in names:
        shown.add_row(name, *(_of_process(own, name) for own in of_tree.values()))
    shown.add_row(
        "CPU of all",
        *(
            f"{_median(sum(map(job.cpu_of_start, names)) for job in own):.2f} s, "
            f"{_median(sum(map(job.cpu_of_update, names)) for job in own):.3f} s"
            for own in of_tree.values()
        ),
    )
    shown.add_row(
        "wall",
        *(f"{_median(j.start for j in own):.2f} s, {_median(j.update for j in own):.3f} s" for own in of_tree.values()),
    )
    shown.add_row("machine used by others", *(f"{_median(job.others for job in own):.0%}" for own in of_tree.values()))
    return shown


def _of_process(jobs: list[Measured], name: str) -> str:
    began = [job.processes[name].began for job in jobs if name in job.processes]
    if not began:
        return "-"
    start, update = _median(j.cpu_of_start(name) for j in jobs), _median(j.cpu_of_update(name) for j in jobs)
    return f"{_median(began):.1f}: {start:.2f} s, {update:.3f} s"


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.time_to_reward.job_cpu", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=3, help="jobs of each checkout")
    parser.add_argument("--updates", type=int, default=12, help="of each job; those after the third are counted")
    parser.add_argument("--tree", type=Path, nargs="+", default=[Path.cwd()], help="checkouts that take turns")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    console = Console(stderr=True)
    for tree in options.tree:  # else each process would compile what has changed, where Python may not write bytecode
        for package in sorted(tree.absolute().glob("*/__init__.py")):
            compileall.compile_dir(package.parent, quiet=1)
    model = str(resolve_model(TASKS["words"].model, lambda line: console.print(line, highlight=False)))
    jobs: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="job_cpu_") as directory:
        for number in range(options.rounds):
            for position, tree in enumerate(options.tree if number % 2 == 0 else options.tree[::-1]):
                job = measure(tree.absolute(), model, Path(directory) / f"{number}_{position}", options.updates)
                jobs.append(job)
                console.print(
                    f"{job.tree}: start {job.start:.1f} s, {sum(map(job.cpu_of_start, job.processes)):.2f} s of CPU; update "
                    f"{job.update:.3f} s, {sum(map(job.cpu_of_update, job.processes)):.3f} s of CPU; "
                    f"load {os.getloadavg()[0]:.1f}, others {job.others:.0%}",
                    highlight=False,
                )
                if options.json is not None:
                    options.json.write_text(json.dumps([asdict(each) for each in jobs], indent=1))
    Console().print(table(jobs))


if __name__ == "__main__":
    main()
