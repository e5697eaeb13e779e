"""Reads the profiles of a run's event loop, and merges the stacks of one into a tree of bounded size.

`counterpoint/run/loop_health/profile.py` writes them: speedscope's JSON, read here, with each different stack and its seconds.
Its content and the names of its files are not trusted.
"""

from __future__ import annotations

import heapq
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from counterpoint.job.directory import is_directory
from counterpoint.job.reading.metrics.metrics_lines import is_number
from counterpoint.orchestrator.steering import PROFILES
from counterpoint.run.loop_health.profile import MAX_DEPTH, MAX_STACKS, SPEEDSCOPE
from counterpoint.transport.config import IDENTIFIER_PATTERN, Config
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.transport.printable import printable

MAX_BYTES = 8 * 2**20
"""The size of a file. The largest that is written, of `MAX_STACKS` stacks of `MAX_DEPTH` frames each, has about as many."""

MAX_ENTRIES = 10_000
"""Entries of the directory that are looked at."""

MAX_PROFILES = 50
"""The newest profiles, which are listed."""

MAX_NODES = 200_000
"""Nodes of the tree while it is built."""

MAX_FRAMES = 2000
"""Frames of the tree that are shown; each may have one besides for what is left out below it."""

LEAST_SHARE = 2e-4
"""A share of the whole time. Frames with less are left out."""

MAX_SECONDS = 1e6
"""The time of one stack. More is no measurement."""

MAX_NAME = 200
"""Characters of a function's name, and of a file's."""


class ListedProfile(Config):
    """A profile that was taken."""

    name: str
    """Names it within the run."""
    time: float
    """The time when it was written, in Unix seconds."""
    size: int
    """Bytes of its file."""


class ProfiledFrame(Config):
    """A frame below its callers, merged from all stacks that begin with the same frames."""

    parent: int
    """The caller's place in the list; -1 for the whole."""
    function: str
    """Its qualified name; empty for the whole and for what is left out."""
    file: str
    """Its file; empty if it has none."""
    line: int
    """The line that it was at; 0 if not known."""
    seconds: float
    """The seconds in it and in what it called."""
    own: float
    """The part of these in itself."""
    other: bool
    """Whether it stands for all that its caller called and that is left out."""


@dataclass(slots=True)
class _Node:
    name: str = ""
    microseconds: int = 0
    own: int = 0
    children: dict[str, _Node] = field(default_factory=dict)


def list_profiles(run_dir: Path) -> list[ListedProfile]:
    """Returns the run's profiles, the newest first."""
    directory = run_dir / PROFILES
    if not is_directory(directory):
        return []
    with os.scandir(directory) as entries:
        names = [entry.name for entry in islice(entries, MAX_ENTRIES) if entry.name.endswith(SPEEDSCOPE)]
    found = [listed for name in names if (listed := _listed(directory / name)) is not None]
    return sorted(found, key=lambda listed: (-listed.time, listed.name))[:MAX_PROFILES]


def read_profile(run_dir: Path, name: str) -> list[ProfiledFrame]:
    """Returns the tree of a profile.

    Raises `UntrustedFileError` if its file is no profile, `OSError` if there is none.
    """
    directory = run_dir / PROFILES
    if re.fullmatch(IDENTIFIER_PATTERN, name) is None or not is_directory(directory):
        raise FileNotFoundError(directory)
    path = directory / f"{name}{SPEEDSCOPE}"
    return merged(_stacks_of(path, read_json(path, MAX_BYTES)))


def merged(stacks: Iterable[tuple[Sequence[str], int]], most: int = MAX_FRAMES) -> list[ProfiledFrame]:
    """Merges stacks (outermost frame first) with their microseconds into a tree.

    A caller is before what it called, the longest first. The first is the whole. What is left out counts in a frame of its own,
    so the seconds of a frame are its own and those of all that are listed below it.
    """
    root = _tree_of(stacks)
    kept = _largest(root, most, root.microseconds * LEAST_SHARE)
    frames: list[ProfiledFrame] = []
    waiting: list[tuple[int, _Node]] = [(-1, root)]
    while waiting:
        parent, node = waiting.pop()
        place = len(frames)
        frames.append(_frame(parent, node.name, node.microseconds, node.own))
        shown = [child for child in node.children.values() if id(child) in kept]
        other = node.microseconds - node.own - sum(child.microseconds for child in shown)
        if other > 0:
            frames.append(_frame(place, "", other, other, is_other=True))
        waiting.extend((place, child) for child in sorted(shown, key=lambda child: (child.microseconds, child.name)))
    return frames


def _frame(parent: int, name: str, microseconds: int, own: int, is_other: bool = False) -> ProfiledFrame:
    function, file, line = place_of(name)
    return ProfiledFrame(
        parent=parent,
        function=function,
        file=file,
        line=line,
        seconds=microseconds / 1e6,
        own=own / 1e6,
        other=is_other,
    )


def place_of(name: str) -> tuple[str, str, int]:
    """Returns function, file and line of `function (file:line)`; of any other name no file, and 0."""
    function, bracket, place = name.partition(" (")
    file, colon, line = place.removesuffix(")").rpartition(":")
    if bracket and colon and place.endswith(")") and line.isascii() and line.isdigit() and len(line) < 10:
        return printable(function[:MAX_NAME]), printable(file[-MAX_NAME:]), int(line)
    return printable(name[:MAX_NAME]), "", 0


def _tree_of(stacks: Iterable[tuple[Sequence[str], int]]) -> _Node:
    root, nodes = _Node(), 1
    for stack, microseconds in stacks:
        node, is_whole = root, len(stack) <= MAX_DEPTH
        node.microseconds += microseconds
        for name in stack[:MAX_DEPTH]:
            child = node.children.get(name)
            if child is None:
                if nodes >= MAX_NODES:
                    is_whole = False
                    break
                child = node.children[name] = _Node(name)
                nodes += 1
            node = child
            node.microseconds += microseconds
        if is_whole:  # else the rest is left out below the node: it has the time, and nothing else does
            node.own += microseconds
    return root


def _largest(root: _Node, most: int, least: float) -> set[int]:
    """Returns the identities of the frames with the most time. A caller has at least the time of what it called."""
    kept = {id(root)}
    heap: list[tuple[int, int, _Node]] = [(-root.microseconds, 0, root)]
    number = 0
    while heap and len(kept) <= most:
        _, _, node = heapq.heappop(heap)
        kept.add(id(node))
        for child in node.children.values():
            if child.microseconds >= least:
                number += 1
                heapq.heappush(heap, (-child.microseconds, number, child))
    return kept


def _stacks_of(path: Path, content: dict[str, Any]) -> Iterator[tuple[list[str], int]]:
    """Yields the stacks of the only profile in the file. Weights that are no time are left out."""
    try:
        names = [frame["name"] for frame in content["shared"]["frames"]]
        (sampled,) = content["profiles"]
        samples, weights, unit = sampled["samples"], sampled["weights"], sampled["unit"]
    except (KeyError, TypeError, ValueError):
        raise UntrustedFileError(f"{path} is no profile: expected speedscope's JSON with one sampled profile") from None
    if unit != "seconds" or not (isinstance(samples, list) and isinstance(weights, list)):
        raise UntrustedFileError(f"{path}: expected lists of samples and of their weights in seconds")
    for sample, weight in islice(zip(samples, weights, strict=False), MAX_STACKS + 1):
        if not is_number(weight) or not 0 < weight <= MAX_SECONDS or not isinstance(sample, list):
            continue
        stack = [names[at] if type(at) is int and 0 <= at < len(names) else None for at in sample[: MAX_DEPTH + 1]]
        if microseconds := round(weight * 1e6):
            yield [name if isinstance(name, str) else "(no name)" for name in stack], microseconds


def _listed(path: Path) -> ListedProfile | None:
    name = path.name.removesuffix(SPEEDSCOPE)
    try:
        found = path.lstat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or re.fullmatch(IDENTIFIER_PATTERN, name) is None:
        return None
    return ListedProfile(name=name, time=found.st_mtime, size=found.st_size)
