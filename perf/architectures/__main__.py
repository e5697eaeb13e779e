"""Checks a tiny model of every causal architecture of transformers, and prints the table of `docs/models.md`.

    python -m perf.architectures [--dtype float32 --dtype bfloat16] [--jobs 2] [--seconds 60] [KIND ...]

Each model is checked in a process of its own, which is killed after `--seconds`; a crash is one cell of the table. The exit code
is 1 if anything was wrong or crashed. `perf/architectures/check.py` says what is compared.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from perf.architectures.check import Outcome, check
from perf.architectures.table import Row, table
from perf.architectures.tiny import kinds, save_model

_FORK: Any = multiprocessing.get_context("fork")  # each child begins with everything imported


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.architectures", description="Checks every causal architecture."
    )
    parser.add_argument(
        "--dtype", action="append", choices=["float32", "bfloat16"], help="precision; both if not given"
    )
    parser.add_argument("--jobs", type=int, default=2, help="models that are checked at once")
    parser.add_argument("--seconds", type=float, default=60.0, help="of one model, until its process is killed")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="model_type; all if none is given")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tasks = [(kind, dtype) for kind in options.kinds or kinds() for dtype in options.dtype or ["float32", "bfloat16"]]
    rows: list[Row] = []
    with ThreadPoolExecutor(options.jobs) as threads:
        for row in threads.map(lambda task: check_apart(task[0], task[1], options.seconds), tasks):
            rows.append(row)
            print(f"{len(rows)}/{len(tasks)} {row.kind} {row.dtype}: {row.worst}", file=sys.stderr, flush=True)
    print(table(rows))
    return int(any(row.worst in ("wrong", "crashed") for row in rows))


def check_apart(kind: str, dtype: str, seconds: float) -> Row:
    """Checks a model in a process of its own, for at most `seconds`."""
    receiving, sending = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=_check, args=(kind, dtype, sending))
    child.start()
    sending.close()
    try:
        if receiving.poll(seconds):
            found = json.loads(receiving.recv_bytes())
        else:
            found = {"weights": ("crashed", f"not ready after {seconds:g} s")}
    except EOFError:
        child.join()
        found = {"weights": ("crashed", f"its process ended with {child.exitcode}")}
    finally:
        child.kill()
        child.join()
        receiving.close()
    return Row(kind, dtype, {aspect: Outcome(*outcome) for aspect, outcome in found.items()})


def _check(kind: str, dtype: str, sending: Any) -> None:
    """Runs in the child.

    torch makes its thread pool anew at the first use after a fork, without a lock: of two threads that are first at once, as
    transformers' are that load weights, one finds none ("Invalid thread pool"). So this thread is the first.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as place:
        found = _outcomes(kind, dtype, Path(place))
    sending.send_bytes(json.dumps({aspect: (each.found, each.detail) for aspect, each in found.items()}).encode())


def _outcomes(kind: str, dtype: str, directory: Path) -> dict[str, Outcome]:
    try:
        save_model(kind, directory, getattr(torch, dtype))
    except Exception as error:  # noqa: BLE001 - of any model's code
        return {"weights": Outcome("not made", f"{type(error).__name__}: {error}")}
    try:
        return check(directory, dtype)
    except Exception as error:  # noqa: BLE001 - of any model's code
        return {"weights": Outcome("crashed", f"{type(error).__name__}: {error}")}


if __name__ == "__main__":
    raise SystemExit(main())
