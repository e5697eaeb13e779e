"""Where a region keeps its files, and the root of a sweep that all regions share.

A worker writes its output in the region in which it runs. The locks of a sweep must be in one place, whichever region a worker
runs in and whichever a sweep is submitted from: `sweep_root` pins them to a region by name.
"""

from __future__ import annotations

import os

ROOT_VARIABLE = "COUNTERPOINT_REGION_ROOT"
"""The root of a region, with `{region}` for its name: `gs://team-{region}`, or `/mnt/{region}`."""
REGION_VARIABLE = "COUNTERPOINT_REGION"
"""The region in which this process runs."""
PLACE = "{region}"


def region_root(region: str | None = None) -> str:
    """Returns the root of a region; without `region`, of the one in which this process runs.

    Raises `ValueError` when the variable that says it is not set.
    """
    template = os.environ.get(ROOT_VARIABLE, "").rstrip("/")
    if not template:
        raise ValueError(
            f"{ROOT_VARIABLE} is not set: set it to where regions keep their files, such as gs://team-{PLACE}"
        )
    if PLACE not in template and region is None:
        return template
    if PLACE not in template:
        raise ValueError(
            f"{ROOT_VARIABLE} = {template!r} is the same in all regions: write {PLACE} where its name belongs"
        )
    named = region or os.environ.get(REGION_VARIABLE, "")
    if not named or "/" in named or named.startswith("."):
        raise ValueError(f"{REGION_VARIABLE} = {named!r} names no region: set it to that in which this process runs")
    return template.replace(PLACE, named)


def sweep_root(region: str, name: str) -> str:
    """Returns the root of the sweep `name`, pinned to a region: the same in every region. Raises as `region_root`."""
    return f"{region_root(region)}/sweeps/{name}"
