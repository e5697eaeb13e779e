"""What the processes of a job hold: memory, its heap, Python's blocks, descriptors, threads, and the files that they leave.

All but heap and blocks are read from `/proc`. Those a process counts itself: `COUNTING`, as a `sitecustomize` on its path, has
it write them to a file of its pid again and again. Memory that was freed and that the C library keeps is "heap free MB": it is
resident, and no object is in it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from counterpoint.transport.process.launch import descendants

COUNTS_VARIABLE = "SOAK_COUNTS"
"""Names the directory where each process of Python writes its counts."""

COUNTING = f"""
import ctypes, json, os, sys, threading

class Heap(ctypes.Structure):  # glibc's struct mallinfo2
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    _fields_ = [(name, ctypes.c_size_t) for name in names]

def counts():
    found = dict(blocks=sys.getallocatedblocks())
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is not None:
        mallinfo2.restype = Heap
        heap = mallinfo2()
        found["heap used MB"] = (heap.uordblks + heap.hblkhd) / 2**20
        found["heap free MB"] = heap.fordblks / 2**20
    return found

def count():
    path = os.path.join(os.environ["{COUNTS_VARIABLE}"], str(os.getpid()))
    pause = threading.Event()
    while not pause.wait(1.0):
        with open(path + ".new", "w") as file:
            json.dump(counts(), file)
        os.replace(path + ".new", path)

if "{COUNTS_VARIABLE}" in os.environ:
    threading.Thread(target=count, name="counting", daemon=True).start()
"""

_NAMES = (
    ("launch.py", "guardians"),
    ("keeper/main.py", "keepers"),
    ("counterpoint.cli.main run", "supervisor"),
    ("counterpoint.cli.main orchestrator", "orchestrator"),
    ("counterpoint.cli.main trainer", "trainer"),
    ("counterpoint.cli.main inference", "inference"),
    ("counterpoint.cli.main serve", "serve"),
    ("perf.soak.answering", "answering server"),
    ("counterpoint.inference.plugin.program", "vLLM API server"),
    ("EngineCore", "vLLM engine"),
)
"""What a command line has, and the name of such a process."""


def held_below(root: int, counts: Path) -> dict[tuple[str, str], float]:
    """Returns what the processes below `root` hold, by the process's name and the measure; those of one name together."""
    held: Counter[tuple[str, str]] = Counter()
    for pid in descendants(root):
        try:
            name = _name(pid)
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            found: dict[str, float] = {
                "processes": 1,
                "resident MB": int(status["VmRSS"].split()[0]) / 1024,
                "threads": int(status["Threads"]),
                "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
            }
        except (OSError, KeyError):
            continue  # it has just ended
        if (count := counts / str(pid)).exists():
            found |= json.loads(count.read_text())
        for measure, value in found.items():
            held[name, measure] += value  # type: ignore[assignment]  # a Counter adds numbers of any type
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
