"""`python -m counterpoint.cluster.master DIRECTORY`: the master of the job in a directory."""

from __future__ import annotations

import sys

from counterpoint.cluster.master.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
