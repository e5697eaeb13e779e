"""What a step's receipt says: the configuration in force, the groups begun and shipped, the weights, and hashes of all recorded.

`docs/receipts.md` describes each field; `counterpoint/verify/` checks them without this code.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson

from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.registry import BUILT_IN
from counterpoint.run.config import RunConfig
from counterpoint.transport.records import Int32Array, Rollout, Turn

_INT32 = np.dtype(np.int32)

RecordHashes: TypeAlias = tuple[bytes, bytes]
"""SHA-256 of a rollout's line, newline included, and of its frame of tokens; empty without one."""

SHOWN_DIGITS = 16
"""Hexadecimal digits of a rollout's hashes in a receipt: they name the damaged rollout, and `records` is the whole hash."""


def rules_of(config: RunConfig) -> dict[str, Any]:
    """Returns the configuration's hash, and its rules by which a step's advantages, filters and ages can be computed again."""
    whole = config.model_dump(mode="json", exclude={"resume"})
    return {
        "configuration": hashlib.sha256(orjson.dumps(whole, option=orjson.OPT_SORT_KEYS)).hexdigest(),
        "rules": {
            "advantage": config.advantage.model_dump(mode="json"),
            "filters": [each.model_dump(mode="json") for each in config.filters],
            "max_off_policy_steps": config.schedule.staleness_limit,
            "seed": config.seed,
        },
    }


def code_of(environments: Sequence[EnvironmentConfig]) -> dict[str, str]:
    """Returns by environment SHA-256 of the file that has its class, as it is on the disk now. Imports nothing. Blocks.

    Without those whose file is not found, such as in an archive.
    """
    files = {each.name: _file_of(BUILT_IN.get(each.kind, each.kind).partition(":")[0]) for each in environments}
    return {
        name: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for name, file in files.items()
        if file is not None and Path(file).is_file()
    }


def _file_of(module: str) -> str | None:
    """Returns the file of a module, found without importing the packages that it is in."""
    places: Sequence[str] = [*sys.path, os.getcwd()]
    file, parts = None, module.split(".")
    for depth in range(1, len(parts) + 1):
        if (spec := PathFinder.find_spec(".".join(parts[:depth]), places)) is None:
            return None
        places, file = spec.submodule_search_locations or (), spec.origin
    return file


def groups_of(shipped: Sequence[int], begun: Sequence[tuple[str, int]], scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what became of groups since the step before.

    `begun` has environment and example of each new group, `scheduler` is the state after the step.
    """
    mix = scheduler["mix"]
    sizes, fingerprints, curricula = (mix.get(name, {}) for name in ("sizes", "fingerprints", "curricula"))
    return {
        "shipped": list(shipped),
        "begun": {"first": scheduler["next_group_id"] - len(begun), "examples": list(begun)},
        "unfinished": [group["group_id"] for group in scheduler["groups"]],
        "examples": {
            name: {
                "drawn": drawn,
                "size": sizes.get(name),
                "fingerprint": fingerprints.get(name),
                "curriculum": name in curricula,
            }
            for name, drawn in mix.get("drawn", {}).items()
        },
    }


def records_of(hashes: Sequence[RecordHashes]) -> dict[str, Any]:
    """Returns the hash of a step's records, and the first digits of each rollout's line and tokens."""
    whole = hashlib.sha256(b"".join(line + tokens for line, tokens in hashes)).hexdigest()
    shown = ["".join(each.hex()[:SHOWN_DIGITS] for each in (line, tokens)) for line, tokens in hashes]
    return {"records": whole, "rollouts": shown}


def turn_hashes(rollout: Rollout) -> Iterator[dict[str, str | None]]:
    """Yields the hashes of each turn's prompt and completion: the first digits of SHA-256 of the ids, as little-endian int32.

    None of a failed rollout's ids that are none. What a prompt has of its branch, or of its player's turn before, is not hashed
    again: a long conversation costs no more than its tokens.
    """
    before = {id(turn): former for branch in rollout.branches or () for former, turn in pairwise(branch.turns)}
    latest: dict[str, Turn] = {}
    hashed_to: dict[int, Any] = {}
    for turn in rollout.turns:
        prompt, completion = turn.prompt_ids, turn.completion_ids
        if prompt.ndim != 1 or completion.ndim != 1 or prompt.dtype != _INT32 or completion.dtype != _INT32:
            yield {"prompt_hash": None, "completion_hash": None}
            continue
        prompt, completion = np.ascontiguousarray(prompt), np.ascontiguousarray(completion)
        former = before.get(id(turn)) or _begun_by(prompt, latest.get(turn.player))
        if former is not None and id(former) in hashed_to:
            hashed = hashed_to[id(former)].copy()
            known = len(former.prompt_ids) + len(former.completion_ids)
        else:
            hashed, known = hashlib.sha256(), 0
        hashed.update(prompt[known:].data)
        of_prompt = hashed.hexdigest()[:SHOWN_DIGITS]
        hashed.update(completion.data)
        latest[turn.player], hashed_to[id(turn)] = turn, hashed
        of_completion = hashlib.sha256(completion.data).hexdigest()[:SHOWN_DIGITS]
        yield {"prompt_hash": of_prompt, "completion_hash": of_completion}


def _begun_by(prompt: Int32Array, former: Turn | None) -> Turn | None:
    """Returns the former turn if the prompt begins with all of its tokens."""
    if former is None:
        return None
    asked = len(former.prompt_ids)
    written = prompt[asked : asked + len(former.completion_ids)]
    is_asked = np.array_equal(prompt[:asked], former.prompt_ids)
    return former if is_asked and np.array_equal(written, former.completion_ids) else None
