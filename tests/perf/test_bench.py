"""`python -m perf.bench` over cases that end well or badly."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from perf.bench import __main__ as bench
from perf.bench.cases import CASES, CaseFailed, module_of
from perf.bench.command import Size
from perf.figures import Case, Figure


def test_a_case_that_fails_costs_no_other_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(name: str, size: Size) -> list[Case]:
        if name == "send":
            raise CaseFailed("the case send ended with 1 and no figures")
        return [Case(name, [Figure("lag", 1.0, "x", 2.0)])]

    monkeypatch.setattr(bench, "measure_case", measure)
    assert bench.main(["send", "receive", "--json"]) == 1
    printed = capsys.readouterr()
    assert [case["case"] for case in json.loads(printed.out)] == ["receive"]
    assert "send ended with 1" in printed.err


@pytest.mark.parametrize(
    ("figure", "noise", "code", "verdict"),
    [
        (Figure("lag", 3.0, "x", 2.0), 0.02, 1, "broken"),
        (Figure("lag", 3.0, "x", 2.0), 0.4, 0, "too noisy"),
        (Figure("lag", 1.0, "x", 2.0), 0.4, 0, "held"),
        (Figure("bytes", 3.0, "x", 2.0, timed=False), 0.4, 1, "broken"),
    ],
)
def test_a_bound_that_others_may_have_broken_decides_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    figure: Figure,
    noise: float,
    code: int,
    verdict: str,
) -> None:
    monkeypatch.setattr(bench, "measure_case", lambda name, size: [Case(name, [figure], noise)])
    assert bench.main(["send", "--json"]) == code
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["figures"][0]["verdict"] == verdict
    assert ("40% of the machine's CPU" in printed.err) == (verdict == "too noisy")


def test_rounds_of_which_too_many_keep_a_bound_decide_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = Figure("lag", 2.1, "x", 2.0, rounds=(1.0, 1.1, 2.1, 2.2, 2.3))
    monkeypatch.setattr(bench, "measure_case", lambda name, size: [Case(name, [figure], 0.02)])
    assert bench.main(["send", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)[0]["figures"][0]["verdict"] == "too noisy"
    assert "send: lag: its bound is broken, but not in three quarters of its rounds" in printed.err


@pytest.mark.parametrize(
    ("values", "flags", "code"),
    [
        ([2.5, 1.5], [], 0),
        ([2.5, 2.6], [], 1),
        ([1.5], [], 0),
        ([2.5], ["--quick"], 1),
    ],
)
def test_a_case_that_breaks_a_bound_is_measured_once_more(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    values: list[float],
    flags: list[str],
    code: int,
) -> None:
    left = iter(values)

    def measure(name: str, size: Size) -> list[Case]:
        return [Case(name, [Figure("lag", next(left), "x", 2.0)])]

    monkeypatch.setattr(bench, "measure_case", measure)
    assert bench.main(["send", *flags]) == code
    printed = capsys.readouterr()
    assert not [*left], "it was measured as often as there are values"
    if len(values) == 2:
        assert f"2.5 x, again {values[1]} x" in printed.out
    assert ("not in a second measurement" in printed.err) == (values == [2.5, 1.5])


@pytest.mark.parametrize(
    ("second", "again"),
    [
        ([Figure("left out", 5.0, "GB"), Figure("lag", 2.5, "x", 2.0)], 2.5),
        ([Figure("left out", 5.0, "GB")], None),
        (None, None),
    ],
)
def test_a_second_measurement_may_lack_figures_or_fail(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    second: list[Figure] | None,
    again: float | None,
) -> None:
    """The first one stands then, and the other cases are measured."""
    left = iter([[Figure("lag", 3.0, "x", 2.0)], second, [Figure("rate", 1.0, "x", 2.0)]])

    def measure(name: str, size: Size) -> list[Case]:
        if (figures := next(left)) is None:
            raise CaseFailed(f"the case {name} ended with 1 and no figures")
        return [Case(name, figures)]

    monkeypatch.setattr(bench, "measure_case", measure)
    assert bench.main(["send", "receive", "--json"]) == 1
    printed = capsys.readouterr()
    broken, held = json.loads(printed.out)
    assert (broken["figures"][0]["verdict"], broken["figures"][0]["again"]) == ("broken", again)
    assert held["held"]
    assert ("when measured once more, the case send ended with 1" in printed.err) == (second is None)


@pytest.mark.parametrize(("flags", "size"), [([], Size.DEFAULT), (["--quick"], Size.QUICK), (["--full"], Size.FULL)])
def test_the_size_is_passed_on(monkeypatch: pytest.MonkeyPatch, flags: list[str], size: Size) -> None:
    asked: list[Size] = []

    def measure(name: str, size: Size) -> list[Case]:
        asked.append(size)
        return []

    monkeypatch.setattr(bench, "measure_case", measure)
    assert bench.main(["send", *flags]) == 0
    assert asked == [size]
    assert size.flags == flags


def test_a_name_of_none_says_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["steps"])
    assert "'steps'; the cases are step, " in capsys.readouterr().err


def test_every_case_has_a_module() -> None:
    for name in CASES:
        assert find_spec(module_of(name)) is not None, name
