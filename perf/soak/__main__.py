"""Runs a whole job for many steps, looks at what each of its processes holds, and says what grows.

The job is `counterpoint run` with a real trainer, `counterpoint serve` beside it and a viewer of its page. Its server only
answers (`perf.soak.answering`), so that a step takes a fraction of a second; with `--demo` it is the demo, vLLM included.

    python -m perf.soak [--demo] [--steps N] [--directory DIRECTORY] [--seconds-between 5]

The exit code is 1 if something is not flat after the first tenth (`perf.soak.growth`). `samples.jsonl` in the directory has
every sample, and `python -m perf.soak --table FILE` prints the table of one again. SIGINT or SIGTERM ends the job early; the
table is that of the steps until then.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import tomli_w
from rich.console import Console
from rich.table import Table

from counterpoint.job.evaluation.server import free_port
from counterpoint.transport.files.json_lines import append_line
from counterpoint.transport.process.child import Child
from perf.bench.servers import served_by
from perf.soak.growth import Growth, growths
from perf.soak.held import COUNTING, COUNTS_VARIABLE, files_below, held_below

STEPS, DEMO_STEPS = 20_000, 2_000
START_SECONDS = 600.0
"""Deadline of the first step."""
END_SECONDS = 600.0
"""Deadline of the end, from the last step on."""
VIEW_SECONDS = 2.0
DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m perf.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--demo", action="store_true", help="the demo's job, with vLLM")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}, {DEMO_STEPS} of the demo")
    parser.add_argument("--directory", type=Path, help="a new directory, which is kept; its path is short")
    parser.add_argument("--seconds-between", type=float, default=5.0, help="between two samples (default: 5)")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="print the table of a samples.jsonl, and run nothing"
    )
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if given.table is not None:
        return show([orjson.loads(line) for line in given.table.read_bytes().splitlines()])
    steps = given.steps or (DEMO_STEPS if given.demo else STEPS)
    with tempfile.TemporaryDirectory(prefix="soak-", dir="/tmp") as temporary:
        directory = given.directory or Path(temporary)
        directory.mkdir(exist_ok=True)
        return soak(directory.absolute(), steps, demo=given.demo, pause=given.seconds_between)


def soak(directory: Path, steps: int, *, demo: bool, pause: float) -> int:
    """Runs the job in `directory` to its last step; prints the table. Returns the exit code."""
    for name in ("site", "counts", "tmp"):
        (directory / name).mkdir()
    (directory / "site" / "sitecustomize.py").write_text(COUNTING)
    paths = [str(directory / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": ":".join(paths),
        COUNTS_VARIABLE: str(directory / "counts"),
        "TMPDIR": str(directory / "tmp"),
    }
    environment = os.environ | variables
    with _answering(environment, demo) as url:
        file = directory / "job.toml"
        file.write_text(tomli_w.dumps(_settings(directory / "job", steps, url)))
        command = [sys.executable, "-P", "-m", "counterpoint.cli.main", "run", str(file)]
        job = Child("the job", command, environment=environment, log=directory / "job.log")
        samples: list[dict[str, Any]] = []
        interrupted = False
        try:
            _watch(samples, job, directory, environment, steps, pause)
            job.wait(END_SECONDS)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            job.kill()
            code = job.wait()
    if code and not interrupted:
        print(f"the job ended with {code}: {(directory / 'job.log').read_text()[-2000:]}", file=sys.stderr)
    return show(samples) or code


def _settings(output_dir: Path, steps: int, url: str) -> dict[str, Any]:
    if not url:
        demo = tomllib.loads(DEMO.read_text())
        demo["output_dir"], demo["orchestrator"]["steps"] = str(output_dir), steps
        demo["inference"]["port"] = free_port("127.0.0.1", 0)
        # The model learns nothing, and what a filter catches counts: once tasks are learned, steps take longer and longer.
        demo["orchestrator"]["training"]["learning_rate"] = 1e-9
        demo["orchestrator"]["schedule"]["on_filtered"] = "ship"
        return demo
    return {
        "output_dir": str(output_dir),
        "model": "tiny-dense",
        "inference": {"replicas": 0},
        "trainer": {"device": "cpu", "max_tokens": 2048, "threads": 1},
        "orchestrator": {
            "steps": steps,
            "inference": {"urls": [url]},
            "sampling": {"max_tokens": 16},
            "schedule": {"group_size": 4, "rollouts_per_step": 8, "max_inflight_rollouts": 32},
            "training": {"learning_rate": 1e-5, "checkpoint_interval": 20, "lora": {"rank": 4}},
            "environments": [{"name": "reverse", "kind": "reverse-text"}],
        },
    }


@contextmanager
def _answering(environment: dict[str, str], demo: bool) -> Iterator[str]:
    """Yields the URL of the server that only answers; an empty one where the job has its own."""
    if demo:
        yield ""
        return
    with served_by("perf.soak.answering", environment=environment) as url:
        yield url


def _watch(
    samples: list[dict[str, Any]],
    job: Child,
    directory: Path,
    environment: dict[str, str],
    steps: int,
    pause: float,
) -> None:
    """Adds samples until the last step; from the first one on, with the page and a viewer of it."""
    deadline = time.monotonic() + START_SECONDS
    while not (step := _newest_step(directory / "job")):
        if job.code is not None or time.monotonic() > deadline:
            return
        time.sleep(0.2)
    with _viewed(directory / "job", environment):
        while step < steps and job.code is None:
            step = _newest_step(directory / "job")
            if step >= steps:
                break  # its processes end now, and growth is of those that are there to the end
            held = [[*key, value] for key, value in held_below(os.getpid(), directory / "counts").items()]
            for name, files in (("job's directory", "job"), ("temporary directories", "tmp")):
                held += [[name, *found] for found in files_below(directory / files).items()]
            samples.append({"step": step, "time": time.time(), "held": held})
            append_line(directory / "samples.jsonl", samples[-1])
            time.sleep(pause)


def _newest_step(job: Path) -> int:
    """Returns the step of the last whole line of a run's metrics; 0 before there is one."""
    for metrics in job.glob("run_*/metrics.jsonl"):
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 65_536))
            lines = file.read().rpartition(b"\n")[0].splitlines()
        if lines:
            return int(orjson.loads(lines[-1])["step"])
    return 0


@contextmanager
def _viewed(job: Path, environment: dict[str, str]) -> Iterator[None]:
    """Serves the page, and polls what it polls: overview, a run's curves, its loop."""
    command = [sys.executable, "-P", "-m", "counterpoint.cli.main", "serve", str(job), "--port", "0"]
    run = next(job.glob("run_*")).name.removeprefix("run_")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        token = next(job.parent.rglob("read.token")).read_text().strip()
        names = f"jobs/{job.name}/"
        paths = ("overview", f"{names}metrics?run={run}&metric=reward/mean&metric=loss", f"{names}runs/{run}/loop")
        stop, failed = threading.Event(), [0]

        def view() -> None:
            while not stop.wait(VIEW_SECONDS):
                for path in paths:
                    asked = urllib.request.Request(
                        f"{address}api/v1/{path}", headers={"Authorization": f"Bearer {token}"}
                    )
                    try:
                        with urllib.request.urlopen(asked, timeout=60) as answer:
                            answer.read()
                    except urllib.error.URLError as error:
                        failed[0] += 1
                        print(f"the page failed: {path}: {error}", file=sys.stderr)

        viewer = threading.Thread(target=view, name="viewer")
        viewer.start()
        try:
            yield
        finally:
            stop.set()
            viewer.join()
            server.terminate()


def show(samples: Sequence[dict[str, Any]]) -> int:
    """Prints the table; returns 1 if something grows, or there is too little to say."""
    found = growths(samples)
    if not found:
        print("too few samples", file=sys.stderr)
        return 1
    steps, seconds = samples[-1]["step"], samples[-1]["time"] - samples[0]["time"]
    table = Table("process", "measure", title=f"{steps} steps in {seconds:.0f} s", title_justify="left")
    for column in ("after a tenth", "at the end", "per 1,000 steps"):
        table.add_column(column, justify="right")
    table.add_column("")
    for each in found:
        table.add_row(each.process, each.measure, *map(_number, (each.first, each.last, each.per_1000)), _verdict(each))
    Console(width=120).print(table)
    return int(not all(each.is_flat for each in found))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}".rstrip("0").rstrip(".")


def _verdict(growth: Growth) -> str:
    return "" if growth.is_flat else "grows"


if __name__ == "__main__":
    sys.exit(main())
