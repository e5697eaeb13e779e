#!/usr/bin/env bash
# With `torch._dynamo.config.suppress_errors` a function that cannot be compiled runs as it is, which is documented. In torch 2.13 it
# then stays so in this process for every later `torch.compile` of it: with another backend, which would work, and with the setting
# off again. Nothing is logged, and no graph is made until `torch._dynamo.reset()`. One expects the second backend to get the graph.
# Exit 0 while that is so, 1 when it has changed.
set -eu
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet "torch==2.13.0" numpy
"$place/venv/bin/python" - <<'PROGRAM'
import logging
import sys

import torch
from torch._dynamo import config, reset


def computed(values):
    return torch.sin(values) * 2 + 1


def full_disk(graph, inputs):
    raise OSError("No space left on device")


def plain(graph, inputs):
    graphs.append(graph)
    return graph.forward


def graphs_of(backend):
    graphs.clear()
    torch.compile(computed, backend=backend)(torch.ones(8))
    return len(graphs)


graphs = []
config.suppress_errors = True
graphs_of(full_disk)  # torch warns, as it says
records = []
handler = logging.Handler(logging.WARNING)
handler.emit = records.append
for name in ("torch", "torch._dynamo"):
    logging.getLogger(name).addHandler(handler)
suppressed = graphs_of(plain)
config.suppress_errors = False
aloud = graphs_of(plain)
warned = len(records)
reset()
anew = graphs_of(plain)
print(f"torch {torch.__version__}: graphs by the second backend {suppressed}, without suppress_errors {aloud}, after a reset {anew}")
print(f"warnings meanwhile: {warned}")
sys.exit((suppressed, aloud, anew, warned) != (0, 0, 1, 0))
PROGRAM
