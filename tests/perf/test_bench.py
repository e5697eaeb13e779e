"""`counterpoint bench` over cases that end well or badly."""

from __future__ import annotations

import json

import pytest

from cli import bench
from perf.figures import Case, Figure


def test_a_case_that_fails_costs_no_other_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str, quick: bool) -> list[Case]:
        if name == "send":
            raise bench.CaseFailed("the case send ended with 1 and no figures")
        return [Case(name, [Figure("lag", 1.0, "x", 2.0)])]

    monkeypatch.setattr(bench, "_measure", measure)
    assert bench.main(["send", "receive", "--json"]) == 1
    printed = capsys.readouterr()
    assert [case["case"] for case in json.loads(printed.out)] == ["receive"]
    assert "send ended with 1" in printed.err
