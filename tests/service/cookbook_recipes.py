"""Plays recipes of the Tinker cookbook in one process, one after another, as `python -m RECIPE SETTING...` does.

Standard input has a list of them as JSON: `[[module, [setting, ...]], ...]`. Each one's name is written to standard output when
it has ended; the first that fails ends the process.
"""

from __future__ import annotations

import json
import runpy
import sys


def main() -> None:
    for module, settings in json.load(sys.stdin):
        sys.argv = [module, *settings]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        print(f"played {module}", flush=True)


if __name__ == "__main__":
    main()
