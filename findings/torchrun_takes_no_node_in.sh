#!/usr/bin/env bash
# `torchrun --nnodes=1:2` promises to take in a node that joins later: all ranks start again, two of them. With the defaults of torch
# 2.13 both nodes wait for keys of the new round that the other one does not write, and end after a minute: the node that has rank 0
# keeps the address that it wrote for the round before. One expects two ranks, as with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
# Exit 0 while that is so, 1 when it has changed.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "torch==2.13.0" numpy
"$place/venv/bin/python" - "$place" <<'PROGRAM'
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

place = Path(sys.argv[1])
(place / "rank.py").write_text(
    "import os, time\nprint('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], flush=True)\ntime.sleep(600)\n"
)


def nodes_that_have(words, outputs):
    return sum(any(words in line for line in output.read_text().splitlines()) for output in outputs)


def wait(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def join_later(**variables):
    """How many nodes run a rank of two once the second has joined, and how many end with an error of the store."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = f"--nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=localhost:{port} --rdzv-conf=last_call_timeout=1 --rdzv-id=job"
    command = [sys.executable, "-m", "torch.distributed.run", *options.split(), str(place / "rank.py")]
    outputs, started = [place / f"{port}-{name}" for name in "ab"], []
    for output in outputs:
        output.touch()
    for output, words in zip(outputs, ("rank 0 of 1", "of 2")):
        with open(output, "w") as file:
            env = os.environ | variables
            started.append(subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True))
        ended = lambda: any(node.poll() is not None for node in started)
        wait(lambda: nodes_that_have(words, outputs) == len(started) or ended(), 180)
    wait(lambda: nodes_that_have("of 2", outputs) == 2 or all(node.poll() is not None for node in started), 30)
    for node in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()
    return nodes_that_have("of 2", outputs), nodes_that_have("DistStoreError: wait timeout", outputs)


default, apart = join_later(), join_later(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
import torch

print(f"torch {torch.__version__}: a second node joins `torchrun --nnodes=1:2`. Expected: 2 nodes run a rank of two, none fails.")
print(f"Seen: {default[0]} run one, {default[1]} end with DistStoreError; with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {apart[0]} and {apart[1]}")
raise SystemExit(not (default == (0, 2) and apart == (2, 0)))
PROGRAM
