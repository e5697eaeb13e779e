"""How the lines of orchestrator and trainer become rows, in order and once."""

from __future__ import annotations

import orjson

from counterpoint.job.tracking.feed import Feed
from counterpoint.transport.files.appended_lines import Line
from counterpoint.transport.files.place import Place


def shipped(step: int) -> bytes:
    return orjson.dumps({"step": step, "time": float(step), "reward/mean": 0.5, "evaluation/x/y": 1.0})


def train(feed: Feed, step: int, loss: float = 1.0) -> None:
    values = {"step": step, "time": step + 0.5, "loss": loss}
    feed.add_trained(orjson.dumps(values), values)


def sent(feed: Feed, over: bool = False) -> list[tuple[int, list[str]]]:
    return [(row.step, sorted(row.values)) for row in feed.rows(over)]


BOTH = ["reward/mean", "trainer/loss"]


def test_a_row_waits_for_both_lines_of_its_step() -> None:
    feed = Feed("a", orchestrated=True)
    feed.add_shipped(shipped(1))
    feed.add_shipped(shipped(2))
    assert sent(feed) == []
    train(feed, 1)
    assert sent(feed) == [(1, BOTH)]
    train(feed, 2)
    assert sent(feed) == [(2, BOTH)]
    assert sent(feed, over=True) == []


def test_a_row_goes_without_a_line_that_will_not_come() -> None:
    feed = Feed("a", orchestrated=True)
    for step in (1, 2, 3):
        feed.add_shipped(shipped(step))
    train(feed, 2)  # so the trainer has passed step 1
    assert sent(feed) == [(1, ["reward/mean"]), (2, BOTH)]
    assert sent(feed, over=True) == [(3, ["reward/mean"])]


def test_supervised_fine_tuning_has_no_orchestrator_to_wait_for() -> None:
    feed = Feed("a")
    train(feed, 1)
    assert sent(feed) == [(1, ["trainer/loss"])]


def test_what_the_sink_has_is_not_sent_again() -> None:
    feed = Feed("a", last=1, orchestrated=True)
    for step in (1, 2):
        feed.add_shipped(shipped(step))
        train(feed, step)
    assert sent(feed) == [(2, BOTH)]


def test_lines_that_are_read_again_are_no_rewind_but_other_ones_are() -> None:
    feed = Feed("a", orchestrated=True)
    for step in (1, 2, 3):
        feed.add_shipped(shipped(step))
        train(feed, step)
    assert len(sent(feed)) == 3
    feed.forget_trained()
    for step in (1, 2, 3):
        train(feed, step)
    assert feed.rewound is None
    feed.forget_trained()
    train(feed, 1)
    train(feed, 2, loss=7.0)
    assert feed.rewound == 2
    feed.settle_rewind(replaced=False)
    assert sent(feed, over=True) == []
    feed.forget_trained()
    train(feed, 2, loss=7.0)  # it is known by now
    assert feed.rewound is None


def test_a_rewind_that_the_sink_takes_sends_the_steps_again() -> None:
    feed = Feed("a", orchestrated=True)
    for step in (1, 2, 3):
        feed.add_shipped(shipped(step))
        train(feed, step)
    assert len(sent(feed)) == 3
    feed.forget_trained()
    train(feed, 1)
    train(feed, 2, loss=7.0)
    feed.settle_rewind(replaced=True)
    feed.forget_shipped()
    for step in (1, 2, 3):
        feed.add_shipped(shipped(step))
    assert sent(feed) == [(2, BOTH)]
    assert sent(feed, over=True) == [(3, ["reward/mean"])]


def test_hostile_lines_are_left_out() -> None:
    feed = Feed("a", orchestrated=True)
    for text in (b"", b"[]", b'{"step": "x"}', b'{"step": 1}', b'{"step": -1, "time": 1.0}', b"\xff"):
        feed.add_shipped(text)
        feed.add_result(Line(Place(), text))
    long = {"step": 1, "time": 1.0, "n" * 5000: 1.0} | {f"m{n}": 1.0 for n in range(5000)}
    feed.add_shipped(orjson.dumps(long))
    (row,) = feed.rows(over=True)
    assert len(row.values) == 2000
    assert max(map(len, row.values)) <= 200
    assert feed.results == []


def test_the_result_of_an_evaluation_comes_after_the_row_of_its_step() -> None:
    line = {
        "evaluation": "e",
        "step": 2,
        "time": 1.0,
        "metrics": {"r": {"value": 0.5, "low": None, "high": 0.6}, "x": 3},
    }
    feed = Feed("a", last=1)
    feed.add_result(Line(Place(), orjson.dumps(line)))
    assert list(feed.due_results(over=False)) == []
    feed.last = 2
    (result,) = feed.due_results(over=False)
    assert (result.run_id, result.name, result.step) == ("a", "e", 2)
    assert result.values == {"evaluation/e/r": 0.5, "evaluation/e/r/high": 0.6}
    assert list(feed.due_results(over=True)) == []
