"""What the processes of a job hold: memory, Python's blocks, descriptors, threads, and the files that they leave.

All but the blocks are read from `/proc`. Python's blocks a process counts itself: `COUNTING`, as a `sitecustomize` on its path,
has it write them to a file of its pid again and again.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from transport.process.launch import descendants

BLOCKS_VARIABLE = "SOAK_BLOCKS"
"""Names the directory where each process of Python writes its blocks."""

COUNTING = f"""
import os, sys, threading

def count():
    path = os.path.join(os.environ["{BLOCKS_VARIABLE}"], str(os.getpid()))
    pause = threading.Event()
    while not pause.wait(1.0):
        with open(path + ".new", "w") as file:
            file.write(str(sys.getallocatedblocks()))
        os.replace(path + ".new", path)

if "{BLOCKS_VARIABLE}" in os.environ:
    threading.Thread(target=count, name="counting blocks", daemon=True).start()
"""

_NAMES = (
    ("launch.py", "guardians"),
    ("cluster.agent", "agent"),
    ("cli.main run", "supervisor"),
    ("cli.main orchestrator", "orchestrator"),
    ("cli.main trainer", "trainer"),
    ("cli.main inference", "inference"),
    ("cli.main serve", "serve"),
    ("perf.soak.answering", "answering server"),
    ("inference.plugin.program", "vLLM API server"),
    ("EngineCore", "vLLM engine"),
)
"""What a command line has, and the name of such a process."""


def held_below(root: int, blocks: Path) -> dict[tuple[str, str], float]:
    """Returns what the processes below `root` hold, by the process's name and the measure; those of one name together."""
    held: Counter[tuple[str, str]] = Counter()
    for pid in descendants(root):
        try:
            name = _name(pid)
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            found = {
                "processes": 1,
                "resident MB": int(status["VmRSS"].split()[0]) / 1024,
                "threads": int(status["Threads"]),
                "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            }
        except (OSError, KeyError):
            continue  # it has just ended
        for measure, value in found.items():
            held[name, measure] += value  # type: ignore[assignment]  # a Counter adds numbers of any type
        if (count := blocks / str(pid)).exists():
            held[name, "blocks"] += int(count.read_text())
    return dict(held)


def files_below(directory: Path) -> dict[str, float]:
    """Returns the number and the size of the files below a directory, which may change meanwhile."""
    sizes = list(_sizes(directory))
    return {"files": len(sizes), "MB": sum(sizes) / 1e6}


def _sizes(directory: Path) -> Iterable[int]:
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                yield os.lstat(f"{parent}/{name}").st_size
            except FileNotFoundError:
                continue


def _name(pid: int) -> str:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return next((name for part, name in _NAMES if part in command), Path(f"/proc/{pid}/comm").read_text().strip())
