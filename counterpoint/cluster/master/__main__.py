"""`python -m counterpoint.cluster.master DIRECTORY`: the master of the job in a directory."""

from __future__ import annotations

import sys

from counterpoint.cluster.master.on_ray import start

if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
