#!/usr/bin/env bash
# Ray 2.60.0: `ray.kill` of an actor whose process is stopped (SIGSTOP: a debugger, a frozen container) has every call fail with
# ActorDiedError at once, while the process lives on for seconds. Whoever then starts a successor that uses the same port, file or
# GPU has two of them.
#
# Expected: a call fails with ActorDiedError once the actor's process is gone.
# Seen: it fails within a second; the process is gone after some five seconds.
# Exit code 1 if that has changed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet ray==2.60.0
cat > "$work/case.py" <<'PYTHON'
import os
import signal
import sys
import time

import ray


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@ray.remote(max_restarts=0)
class Holder:
    async def begin(self):
        return os.getpid()

    async def wait(self):
        import asyncio

        await asyncio.sleep(600)


ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
holder = Holder.remote()
process = ray.get(holder.begin.remote())
waiting = holder.wait.remote()
os.kill(process, signal.SIGSTOP)
began = time.monotonic()
ray.kill(holder)
try:
    ray.get(waiting, timeout=60)
except ray.exceptions.ActorDiedError:
    told = time.monotonic() - began
else:
    sys.exit("the call did not fail")
lived = lives(process)
while lives(process) and time.monotonic() - began < 60:
    time.sleep(0.05)
gone = time.monotonic() - began
print(f"ray {ray.__version__}: ActorDiedError after {told:.2f} s; the process lived then: {lived}, and was gone after {gone:.1f} s")
ray.shutdown()
sys.exit(0 if lived else 1)
PYTHON
RAY_USAGE_STATS_ENABLED=0 RAY_TMPDIR="$work" "$work/venv/bin/python" "$work/case.py" 2> "$work/errors" || { code=$?; tail -5 "$work/errors" >&2; exit "$code"; }
