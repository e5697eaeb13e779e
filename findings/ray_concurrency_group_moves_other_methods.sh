#!/usr/bin/env bash
# Ray 2.60.0: the methods of a plain actor run in the main thread of its process, so they may set signal handlers. Give one method
# a concurrency group of its own, and all others leave the main thread, too.
#
# Expected: a group for a `status` method changes where that one runs, and no other.
# Seen: `start`, which is in no group, then runs in another thread, and `signal.signal` raises ValueError.
# Exit code 1 if that has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet ray==2.60.0
cat > "$work/case.py" <<'PYTHON'
import signal
import sys

import ray


class Worker:
    def start(self):
        try:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        except ValueError as error:
            return str(error)
        return "main thread"


@ray.remote
class Plain(Worker):
    pass


@ray.remote(concurrency_groups={"asked": 1})
class Grouped(Worker):
    @ray.method(concurrency_group="asked")
    def status(self):
        return "fine"


ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
plain, grouped = ray.get([Plain.remote().start.remote(), Grouped.remote().start.remote()])
print(f"ray {ray.__version__}: without a group, start runs in: {plain}")
print(f"with a group for another method, start says: {grouped}")
ray.shutdown()
sys.exit(0 if plain == "main thread" and grouped.startswith("signal only works in main thread") else 1)
PYTHON
RAY_USAGE_STATS_ENABLED=0 RAY_TMPDIR="$work" "$work/venv/bin/python" "$work/case.py" 2> "$work/errors" || { code=$?; tail -5 "$work/errors" >&2; exit "$code"; }
