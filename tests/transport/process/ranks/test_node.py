"""Real ranks under torch's agent, alone on a node and on two: scripts that do not import torch, which takes seconds."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from counterpoint.transport.process.launch import descendants
from counterpoint.transport.process.ranks.node import (
    LOOPBACK,
    RanksOrder,
    RanksProcess,
    alone,
    interfaces,
    listen,
    python_command,
)
from tests.support.polling import wait_until

WRITE = """
import json, os, sys
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "CUSTOM"]
found = {name: os.environ.get(name, "") for name in names} | {"open": sorted(os.listdir("/proc/self/fd"))}
path = os.path.join(sys.argv[1], os.environ["RANK"])
open(path + ".part", "w").write(json.dumps(found))
os.rename(path + ".part", path)
"""

WAIT = "import os, sys, time; open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').close(); time.sleep(600)"

ONE_FAILS = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(600)"


FAIL_SECOND = """
import time
while os.environ["RANK"] == "0" or not os.path.exists(os.path.join(sys.argv[1], "0")):
    time.sleep(0.01)
sys.exit(3)
"""


def command(code: str, directory: Path) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code, str(directory))


@contextmanager
def closing(*processes: RanksProcess) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.close()
    for process in processes:
        assert not Path(process.order.directory).exists()


def codes(*processes: RanksProcess) -> list[int | None]:
    """Once all have ended."""
    wait_until(lambda: all(process.poll() is not None for process in processes), "the end of the ranks")
    return [process.poll() for process in processes]


@pytest.mark.slow
def test_ranks_of_one_node_find_one_another_on_loopback(tmp_path: Path) -> None:
    ranks = alone(command(WRITE, tmp_path), 2, {"CUSTOM": "1"})
    with closing(ranks):
        assert codes(ranks) == [0]
        assert ranks.node_rank == 0
        assert ranks.failure is None
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    assert [each["RANK"] for each in found] == [each["LOCAL_RANK"] for each in found] == ["0", "1"]
    assert {each["MASTER_ADDR"] for each in found} == {LOOPBACK}
    assert {each["MASTER_PORT"] for each in found} == {str(ranks.order.port)}
    assert {(each["GLOO_SOCKET_IFNAME"], each["CUSTOM"], each["WORLD_SIZE"]) for each in found} == {("lo", "1", "2")}
    assert all(len(each["open"]) == 4 for each in found), "the standard streams, and that of the listing"


@pytest.mark.slow
def test_ranks_of_two_nodes_are_numbered_and_the_failing_one_is_named(tmp_path: Path) -> None:
    listener = listen()
    host, port = listener.getsockname()
    code = WRITE + FAIL_SECOND
    directories = [tmp_path / "errors0", tmp_path / "errors1"]
    orders = [RanksOrder("round-1", host, port, 2, 1, command(code, tmp_path), str(path)) for path in directories]
    for path in directories:
        path.mkdir()
    nodes = [RanksProcess(orders[0], listener), RanksProcess(orders[1], None)]
    with closing(*nodes):
        wait_until(lambda: any(node.poll() is not None for node in nodes), "the end of the failed rank")
        for node in nodes:
            node.terminate()
        assert 0 not in codes(*nodes)
        assert "rank 1 ended with exit code 3" in [node.failure for node in nodes]
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1)]
    assert [(each["RANK"], each["WORLD_SIZE"], each["LOCAL_RANK"]) for each in found] == [
        ("0", "2", "0"),
        ("1", "2", "0"),
    ]
    assert {(each["MASTER_ADDR"], each["MASTER_PORT"]) for each in found} == {(host, str(port))}


@pytest.mark.slow
def test_a_failed_rank_ends_its_neighbour_and_a_kill_ends_all(tmp_path: Path) -> None:
    failing, killed = (alone(command(code, tmp_path), 2) for code in (ONE_FAILS, WAIT))
    with closing(failing, killed):
        assert codes(failing) == [1]
        assert failing.failure == "rank 1 ended with exit code 3"
        wait_until(lambda: killed.poll() is not None or killed.node_rank is not None, "the ranks")
        below = descendants(killed.child.pid)
        killed.close()
        assert codes(killed) != [0]
        assert killed.failure is not None
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "the end of all")


def test_exactly_one_of_script_and_module_is_run() -> None:
    assert python_command("train.py", arguments=("--fast",)) == (sys.executable, "-u", "train.py", "--fast")
    assert python_command(module="train") == (sys.executable, "-u", "-m", "train")
    for script, module in (("", ""), ("train.py", "train")):
        with pytest.raises(ValueError, match="exactly one"):
            python_command(script, module)


def test_only_a_loopback_address_ties_collectives_to_the_loopback_interface() -> None:
    assert set(interfaces(LOOPBACK).values()) == {"lo"}
    assert interfaces("192.0.2.7") == interfaces("node7") == {}


def test_nothing_is_left_where_the_child_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.transport.process.launch.guarded", lambda *_, **__: [str(tmp_path / "missing")])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        alone(("true",), 1)
    assert set(os.listdir("/proc/self/fd")) <= before, "others may close theirs meanwhile"
