"""The child that checks a node, and what its parent makes of one that fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from counterpoint.cluster.elastic.node_check import CheckError, CheckProcess
from counterpoint.transport.process.ranks.node import LOOPBACK
from tests.support.polling import wait_until

ECHO = "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)"


@contextmanager
def check(code: str | None = None) -> Iterator[CheckProcess]:
    process = CheckProcess([sys.executable, "-S", "-c", code] if code is not None else ())
    try:
        yield process
    finally:
        process.close()


@pytest.mark.parametrize(
    ("code", "seconds", "message"),
    [
        ("import time; time.sleep(600)", 0.1, r"no line within 0\.1 s"),
        ("import sys; sys.exit(7)", 60, r"exit code 7|Broken pipe"),
        ("import sys; sys.stdin.readline(); sys.exit(7)", 60, "ended with exit code 7"),
        ("import sys; sys.stdin.readline(); print('x' * 2_000_000)", 60, "more than 1048576 bytes"),
        ("""print('{"error": "no GPU"}', flush=True); input()""", 60, "^no GPU$"),
    ],
)
def test_a_child_that_does_not_answer_well_is_a_failed_check(code: str, seconds: float, message: str) -> None:
    with check(code) as process, pytest.raises(CheckError, match=message):
        process.ask({"measure": {}}, seconds)


def test_another_child_is_started_after_one_that_failed() -> None:
    with check(ECHO) as process:
        assert process.ask({"a": 1}, 60) == {"a": 1}
        first = process._child
        assert first is not None
        first.kill()
        with pytest.raises(CheckError):
            process.ask({"a": 2}, 60)
        assert process.ask({"a": 3}, 60) == {"a": 3}
        assert process._child is not first


def test_a_check_can_be_aborted_from_another_thread() -> None:
    """Also where a guardian does not hear its first SIGHUP, as below `nohup`."""
    with check("import time; time.sleep(600)") as process, ThreadPoolExecutor(1) as executor:
        failed = executor.submit(process.ask, {"measure": {}}, 600)
        wait_until(lambda: process._child is not None, "the child")
        process.abort()
        assert isinstance(failed.exception(60), CheckError)
        with pytest.raises(CheckError, match="being stopped"):
            process.ask({"measure": {}}, 60)


@pytest.mark.slow
def test_two_real_nodes_are_measured_and_meet() -> None:
    """Then one of them is alone, and says so."""
    with check() as first, check() as second, ThreadPoolExecutor(2) as executor:
        # Both children start here: the guardian of one follows the thread that started it.
        port = first.ask({"listen": LOOPBACK}, 60)["port"]
        rates = second.ask({"measure": {}}, 120)["rates"]
        assert set(rates) == {"compute", "memory"}
        assert all(rate > 1e6 for rate in rates.values())
        pair = {"host": LOOPBACK, "port": port, "seconds": 60}
        answers = [
            executor.submit(process.ask, {"pair": pair | {"rank": rank}}, 120)
            for rank, process in enumerate((first, second))
        ]
        assert all(0 < answer.result(120)["seconds"] < 60 for answer in answers)
        port = second.ask({"listen": LOOPBACK}, 60)["port"]
        with pytest.raises(CheckError, match="timeout"):
            second.ask({"pair": {"host": LOOPBACK, "port": port, "rank": 0, "seconds": 1}}, 120)
        with pytest.raises(CheckError, match="unknown question"):
            second.ask({"what": 1}, 60)
