"""Measures everything that a GPU is needed for: one table last, JSON beside it.

    python -m perf.gpu [ROW ...] [--device cuda|cpu] [--json FILE] [--list]

Each row runs in a process of its own, with a deadline of its own; a row that fails is told in the table and does not end the
others. Ctrl-C and SIGTERM end the row that runs, with all that it started; the table then has those before it. It needs no
network: models have random weights, but the real one, whose row tells what is missing where its package is not installed.
`--device cpu` runs each row small, which shows that it works and nothing more. The exit code is 1 if a row failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from counterpoint.transport.files.shared_memory import SHARED_MEMORY
from counterpoint.transport.process.child import Child
from perf.gpu.rows import ROWS

STOP_SECONDS = 10.0
ERROR_LINES = 15


@dataclass(frozen=True, slots=True)
class Result:
    """What one row gave."""

    row: str
    seconds: float
    figures: dict[str, float | int | str]
    """Empty if it failed."""
    error: str = ""
    """The end of its output, if it failed."""


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m perf.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, help="default: outputs/gpu.json", default=Path("outputs/gpu.json"))
    parser.add_argument("--list", action="store_true", help="print the rows, and run nothing")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{name:24} {row.shows}" for name, row in ROWS.items()))
        return 0
    if unknown := [name for name in given.rows if name not in ROWS]:
        parser.error(f"{', '.join(unknown)}: no such row; there are {', '.join(ROWS)}")
    machine = _machine(given.device)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    results: list[Result] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for name in given.rows or ROWS:
            result = run_row(name, given.device, ROWS[name].seconds)
            results.append(result)
            console.print(f"{name}: {_words(result)}", highlight=False, markup=False)
            rows = [_as_json(each) for each in results]
            given.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    finally:
        Console(width=150).print(table(machine, results))
    return int(any(result.error for result in results))


def run_row(name: str, device: str, seconds: float) -> Result:
    """Runs a row under a guardian, after which nothing is left that it started; ends it after that time."""
    # Models of gigabytes are written and read again: a disk would be what is measured.
    place = SHARED_MEMORY if device == "cuda" else None
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=place) as directory:
        result, output = Path(directory) / "result.json", Path(directory) / "output.log"
        command = [sys.executable, "-m", "perf.gpu.rows", name, device, directory, str(result)]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        began, error = time.monotonic(), ""
        with Child(f"the row {name}", command, environment=environment, log=output) as process:
            try:
                if code := process.wait(seconds):
                    error = "\n".join(process.last_lines(ERROR_LINES)) or f"it ended with {code}"
            except TimeoutError:
                error = f"ended after {seconds:.0f} s, its deadline"
            finally:
                process.stop(STOP_SECONDS)
        return Result(name, time.monotonic() - began, {} if error else json.loads(result.read_text()), error)


def _machine(device: str) -> str:
    import torch

    versions = f"torch {torch.__version__}, Python {sys.version.partition(' ')[0]}"
    if device == "cpu":
        return f"CPU, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {versions}"
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here (torch.cuda.is_available() is False); --device cpu runs the rows small")
    memory = torch.cuda.get_device_properties(0).total_memory
    return f"{torch.cuda.get_device_name()}, {memory / 2**30:.0f} GiB, load {os.getloadavg()[0]:.1f}; {versions}"


def _words(result: Result) -> str:
    if result.error:
        return result.error
    return ", ".join(f"{name} {_number(value)}" for name, value in result.figures.items())


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _as_json(result: Result) -> dict[str, object]:
    return {"row": result.row, "seconds": round(result.seconds, 1), "figures": result.figures, "error": result.error}


def table(machine: str, results: list[Result]) -> Table:
    """Returns the table for a person."""
    shown = Table("row", "s", "figures", title=machine, show_lines=True)
    for result in results:
        words = result.error.splitlines()[-1] if result.error else _words(result)
        shown.add_row(result.row, f"{result.seconds:.0f}", f"FAILED: {words}" if result.error else words)
    return shown


if __name__ == "__main__":
    sys.exit(main())
