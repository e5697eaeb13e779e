"""A program for the tests: what looks from outside like a run's orchestrator and its trainer's part. It holds the run's lock and
writes the metrics of 20 steps; SIGTERM ends it with 143, as one that drains.

`python -m tests.cli.fake_orchestrator OUTPUT RUN BEHAVIOUR [--resume]`; BEHAVIOUR is `finish`, or, at the third step, `fail`
(exit code 3), `hang` (until it is evicted), `stubborn` (likewise, and SIGTERM does not end it), `die` (SIGKILL; not with
`--resume`), `return` (likewise, and then hangs), or `wait` (until there is a file `control/go`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.process.notify import notify_ready
from tests.support.jobs import shipped_line, trained_line


def append(file: Path, line: dict[str, object]) -> None:
    file.parent.mkdir(exist_ok=True)
    with open(file, "a") as lines:
        lines.write(json.dumps(line) + "\n")


def main(output: Path, run_id: str, behaviour: str, resumes: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else lambda *_: sys.exit(143))
    run_dir = output / f"run_{run_id}"
    take_lock(run_dir / "orchestrator.lock", "another orchestrator runs")
    (run_dir / "control").mkdir(exist_ok=True)
    notify_ready()
    metrics = run_dir / "metrics.jsonl"
    before = len(metrics.read_text().splitlines()) if resumes and metrics.exists() else 0
    for step in range(before + 1, 21):
        append(output / "trainer" / "metrics.jsonl", trained_line(step, run_id))
        append(metrics, shipped_line(step, time.time()))  # last: the tests wait for it, and may end this process then
        time.sleep(0.02)
        if step < 3 or (step > 3 and behaviour != "return"):
            continue
        if behaviour == "fail":
            print("the disk is full", file=sys.stderr)
            sys.exit(3)
        while behaviour == "wait" and not (run_dir / "control" / "go").exists():
            time.sleep(0.05)
        while behaviour in ("hang", "stubborn") or (behaviour == "return" and resumes):
            time.sleep(0.05)
            if (run_dir / "control" / "evicted.txt").exists():
                sys.exit(3)
        if behaviour in ("die", "return") and not resumes:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], "--resume" in sys.argv)
