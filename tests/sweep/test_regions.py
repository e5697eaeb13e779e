"""Where regions keep their files, and configurations whose paths a worker fills in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from counterpoint.job.configuration.layers import NOT_CONFIGURATION
from counterpoint.sweep import InputName, OutputName, region_root, resolve_names, sweep_root
from counterpoint.sweep.identity import Identity
from counterpoint.sweep.regions import REGION_VARIABLE, ROOT_VARIABLE


def test_a_sweeps_root_is_the_same_in_every_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTERPOINT_REGION_ROOT", "gs://team-{region}/")
    found = []
    for region in ("eu-west", "us-central2"):
        monkeypatch.setenv("COUNTERPOINT_REGION", region)
        found.append((sweep_root("us-central2", "grid"), region_root()))
    assert found == [
        ("gs://team-us-central2/sweeps/grid", "gs://team-eu-west"),
        ("gs://team-us-central2/sweeps/grid", "gs://team-us-central2"),
    ]


@pytest.mark.parametrize(
    ("variables", "region", "message"),
    [
        ({}, None, "COUNTERPOINT_REGION_ROOT is not set"),
        ({"COUNTERPOINT_REGION_ROOT": "/mnt/{region}"}, None, "COUNTERPOINT_REGION = '' names no region"),
        ({"COUNTERPOINT_REGION_ROOT": "/mnt/{region}"}, "../etc", "names no region"),
        ({"COUNTERPOINT_REGION_ROOT": "/mnt/all"}, "eu", "the same in all regions"),
    ],
)
def test_a_region_that_is_not_known_is_refused(
    variables: dict[str, str], region: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        region_root(region)


def test_the_variables_of_regions_are_no_keys_of_a_configuration() -> None:
    assert {REGION_VARIABLE, ROOT_VARIABLE} <= NOT_CONFIGURATION


@dataclass(frozen=True)
class Trial:
    name: str
    paths: dict[str, Any]
    fixed: int = field(default=3, init=False)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_names_become_paths_wherever_they_stand() -> None:
    trial = Trial("a", {"out": OutputName(), "in": [(InputName("data/x"), 1)], "log": OutputName("log.txt")})
    resolved = resolve_names(trial, "gs://eu/a/", "gs://eu")
    assert resolved == Trial("a", {"out": "gs://eu/a", "in": [("gs://eu/data/x", 1)], "log": "gs://eu/a/log.txt"})
    assert trial.paths["out"] == OutputName()
    pair = Pair(InputName("x"), frozenset({OutputName("y")}))
    assert resolve_names(pair, "out", "in") == Pair("in/x", frozenset({"out/y"}))


@pytest.mark.parametrize("name", ["/etc", "../other", "a/../../b", "s3://elsewhere"])
def test_a_name_stays_below_its_place(name: str) -> None:
    for kind in (OutputName, InputName):
        with pytest.raises(ValueError, match="leaves the place"):
            kind(name)


def test_a_configuration_with_names_is_compared_by_its_names() -> None:
    def digest(name: str) -> str | None:
        return Identity(Trial("a", {"out": OutputName(name)})).digest

    assert digest("x") == digest("x") is not None
    assert digest("x") != digest("y")
