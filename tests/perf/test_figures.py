"""Bounds, how they widen, and that figures survive their way through JSON."""

from __future__ import annotations

import json

import pytest

from perf.figures import Case, Figure
from perf.stalls import Stalls


@pytest.mark.parametrize(
    ("figure", "held"),
    [
        (Figure("lag", 2.0, "x", 2.0), True),
        (Figure("lag", 2.1, "x", 2.0), False),
        (Figure("rate", 0.6, "x", 0.6, "at least"), True),
        (Figure("rate", 0.5, "x", 0.6, "at least"), False),
        (Figure("bytes", 3.0, "MB"), None),
    ],
)
def test_a_bound_is_kept_or_broken(figure: Figure, held: bool | None) -> None:
    assert figure.held is held
    assert Case("case", [figure]).held is (held is not False)


def test_gross_bounds_are_wider_ratios() -> None:
    case = Case(
        "c", [Figure("a", 5.0, "x", 2.0), Figure("b", 0.3, "x", 0.6, "at least", slack=2.0), Figure("t", 9.0, "s", 1.0)]
    )
    assert not case.held
    assert [figure.bound for figure in case.gross().figures] == [6.0, 0.3, None]
    assert case.gross().held


def test_a_case_survives_json() -> None:
    case = Case("c", [Figure("a", 5.0, "x", 2.0), Figure("b", 0.3, "MB/s", timed=False, rounds=(0.3, 0.4))], 0.25, 0.03)
    assert Case.of_json(json.loads(json.dumps(case.as_json()))) == case


@pytest.mark.parametrize(
    ("figure", "verdict"),
    [
        (Figure("lag", 2.1, "x", 2.0, rounds=(1.5, 1.9, 2.1, 2.2, 2.9)), "too noisy"),
        (Figure("lag", 2.1, "x", 2.0, rounds=(1.9, 2.1, 2.1, 2.2, 2.9)), "broken"),
        (Figure("lag", 2.0, "x", 2.0, rounds=(1.5, 1.9, 2.0, 2.2, 2.9)), "held"),
        (Figure("rate", 0.5, "x", 0.6, "at least", rounds=(0.4, 0.5, 0.6, 0.7)), "too noisy"),
        (Figure("rate", 0.5, "x", 0.6, "at least", rounds=(0.4, 0.5, 0.5, 0.7)), "broken"),
        (Figure("bytes", 3.0, "MB", 2.0, rounds=(1.0, 3.0, 4.0), timed=False), "broken"),
        (Figure("lag", 12.0, "ms", 10.0, idle_share=0.09), "broken"),
        (Figure("lag", 12.0, "ms", 10.0, idle_share=0.11), "too noisy"),
        (Figure("lag", 9.0, "ms", 10.0, idle_share=0.5), "held"),
        (Figure("lag", 12.0, "ms", 10.0, unstalled=9.9), "too noisy"),
        (Figure("lag", 12.0, "ms", 10.0, unstalled=10.1), "broken"),
        (Figure("rate", 8.0, "x", 10.0, "at least", unstalled=11.0), "too noisy"),
        (Figure("rate", 8.0, "x", 10.0, "at least", unstalled=9.0), "broken"),
        (Figure("lag", 9.0, "ms", 10.0, unstalled=12.0), "held"),
        (Figure("lag", 12.0, "ms", 10.0, again=9.9), "too noisy"),
        (Figure("lag", 12.0, "ms", 10.0, again=10.1), "broken"),
        (Figure("bytes", 12.0, "MB", 10.0, again=9.0, timed=False), "broken"),
        (Figure("lag", 9.0, "ms", 10.0, again=12.0), "held"),
    ],
)
def test_what_the_same_run_shows_to_be_noise_breaks_no_bound(figure: Figure, verdict: str) -> None:
    assert Case("case", [figure]).verdict(figure) == verdict
    assert Case("case", [figure]).held is (verdict != "broken")


def test_a_case_takes_its_figures_without_the_stalls_only_where_these_were_recorded() -> None:
    case, calm = Case("case", [Figure("lag", 12.0, "ms", 10.0)]), Case("case", [Figure("lag", 3.0, "ms", 10.0)])
    assert case.beside(calm, Stalls()) == case
    beside = case.beside(calm, Stalls(recorded=True, intervals=[(1.0, 1.25)]))
    assert (beside.figures[0].value, beside.figures[0].unstalled, beside.stall_seconds) == (12.0, 3.0, 0.25)


@pytest.mark.parametrize(("measured", "words"), [({}, None), ({"noise": 0.0}, " 0% "), ({"noise": 0.25}, " 25% ")])
def test_a_table_has_no_noise_that_was_not_measured(measured: dict[str, float], words: str | None) -> None:
    caption = Case("chaos", [Figure("rounds", 3.0, "")], **measured).as_table().caption
    assert caption is None if words is None else words in str(caption)
