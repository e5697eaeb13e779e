"""The weights of evaluated versions: held during their evaluation, and those of the best version, kept.

The trainer removes a broadcast after a few newer ones. Its files never change, so hard links hold them at no cost. From another
disk, or from shared memory, they are copied.

    run_<id>/evaluations/<evaluation>/weights/step_N/    while an evaluation is due or played
    run_<id>/best/step_N/                                one directory, with `best.json` beside the weights
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import orjson

from counterpoint.inference.checkpoint import is_delta
from counterpoint.inference.delta import make_whole
from counterpoint.orchestrator.evaluation.result import EvaluationResult
from counterpoint.transport.files.atomic import STABLE, publish_directory, published_steps, remove_directory
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json

logger = logging.getLogger(__name__)

BEST = "best"
BEST_FILE = "best.json"

_MAX_BYTES = 2**20
"""The size of `best.json`."""


def hold(run_dir: Path, evaluation: str, step: int) -> Path:
    """Holds the weights of `broadcast/step_N` for an evaluation, and returns their directory. Blocks.

    Raises `FileNotFoundError` if the broadcast was removed meanwhile.
    """
    held = _held(run_dir, evaluation) / f"step_{step}"
    if not (held / STABLE).exists():
        _link(run_dir / "broadcast" / f"step_{step}", held, {})
    return held


def release(run_dir: Path, evaluation: str, step: int) -> None:
    """Removes held weights. Blocks."""
    remove_directory(_held(run_dir, evaluation) / f"step_{step}")


def held_steps(run_dir: Path, evaluation: str) -> list[int]:
    """Returns the steps with held weights for an evaluation, ascending."""
    return published_steps(_held(run_dir, evaluation))


def _held(run_dir: Path, evaluation: str) -> Path:
    return run_dir / "evaluations" / evaluation / "weights"


def keep_if_best(run_dir: Path, result: EvaluationResult, held: Path) -> bool:
    """Keeps the held weights in `best/` if the result's score is above that of those kept. Blocks. Raises `OSError`."""
    score = result.score
    kept = _kept(run_dir / BEST)
    asked = (result.config.name, result.config.keep_best)
    known = [each["score"] for each in kept.values() if (each.get("evaluation"), each.get("metric")) == asked]
    if score is None or any(each >= score for each in known) or result.step in kept:
        return False
    content = {
        "step": result.step,
        "score": score,
        "metric": result.config.keep_best,
        "evaluation": result.config.name,
        "policy_version/min": result.line["policy_version/min"],
        "policy_version/max": result.line["policy_version/max"],
    }
    _link(held, run_dir / BEST / f"step_{result.step}", {BEST_FILE: orjson.dumps(content)})
    for step in kept:
        remove_directory(run_dir / BEST / f"step_{step}")
    return True


def _kept(best: Path) -> dict[int, dict[str, Any]]:
    """Returns the kept `best.json` by step: one, or two after a kill between writing one and removing the other."""
    found: dict[int, dict[str, Any]] = {}
    for step in published_steps(best):
        path = best / f"step_{step}" / BEST_FILE
        try:
            content = read_json(path, _MAX_BYTES)
            found[step] = {**content, "score": float(content["score"])}
        except (OSError, KeyError, TypeError, ValueError, UntrustedFileError) as error:
            logger.warning("%s cannot be read, and is replaced: %r", path, error)
            found[step] = {}
    return found


def _link(source: Path, target: Path, files: dict[str, bytes]) -> None:
    """Publishes `target` with the files of `source`, and `files`. With `files`, whole weights take the place of a delta.

    Raises `FileNotFoundError` if `source` is removed meanwhile.
    """
    with publish_directory(target, durable=bool(files)) as partial:
        for path in sorted(source.rglob("*")):
            if not path.is_dir() and path.name not in (STABLE, *files):
                place = partial / path.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                _link_file(path, place)
        if files and is_delta(partial):
            make_whole(partial)
        for name, content in files.items():
            (partial / name).write_bytes(content)
        (source / STABLE).stat()  # a removal begins with it: all files above were there


def _link_file(source: Path, target: Path) -> None:
    if source.is_symlink():  # into shared memory: a link to the link would hold nothing
        shutil.copyfile(source, target)
        return
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)
