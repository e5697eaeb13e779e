"""The example of workers that run their own loops: every role is killed, and then terminated, and each record counts once."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from counterpoint.cluster import JobHandle, load_spec, submit
from examples.pipeline import letters
from tests.support.job_workers import running
from tests.support.polling import DEADLINE_SECONDS, wait_until

REPOSITORY = Path(__file__).parents[2]
JOB = REPOSITORY / "examples" / "pipeline" / "job.toml"
LINES = (REPOSITORY / "docs" / "cluster.md").read_text().splitlines()
SOURCES, DRAWS, PER_KILL = 2, 64, 60


class Text:
    """The text that the job reads, written while it runs."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir()
        self.lines: list[str] = []
        self._output = file.open("w", buffering=1)

    def grow(self, count: int) -> None:
        begun = len(self.lines)
        self.lines += [LINES[number % len(LINES)] for number in range(begun, begun + count)]
        self._output.writelines(f"{line}\n" for line in self.lines[begun:])
        self._output.flush()

    def end(self) -> None:
        with self._output:
            self._output.write(".\n")

    def counted(self) -> tuple[list[tuple[str, int]], letters.Table]:
        """The names of its records with pairs, and the table, computed here."""
        table, names = letters.empty_table(), []
        for number, line in enumerate(self.lines):
            origin, position = f"source-{number % SOURCES}", number // SOURCES
            pairs = letters.draw(letters.tokenize(line), origin, position, DRAWS)
            if pairs is not None:
                letters.count(table, pairs)
                names.append((origin, position))
        return sorted(names), table


def committed(directory: Path) -> tuple[list[tuple[str, int]], letters.Table]:
    """The names of all records that the trainers have committed, and the sum of their tables."""
    table, names = letters.empty_table(), []
    for file in directory.glob("trainer-?.commit"):
        state: dict[str, Any] = msgpack.unpackb(file.read_bytes())["state"]
        table += np.frombuffer(state["table"], dtype=np.int64).reshape(table.shape)
        names += [(origin, position) for origin, position in state["records"]]
    return sorted(names), table


def end_one_of_each_role(handle: JobHandle, text: Text, chance: random.Random, number: signal.Signals) -> None:
    """Sends the signal to a worker of each role, in any order and while records pass; returns once all of them run again."""
    victims: list[str] = [chance.choice(role.worker_names) for role in handle.spec.roles]
    chance.shuffle(victims)
    killed: dict[str, int] = {}
    for victim in victims:
        before = len(committed(handle.directory)[0])
        text.grow(PER_KILL)
        wait_until(
            lambda before=before: len(committed(handle.directory)[0]) > before,  # type: ignore[misc]
            f"a commit before {victim} ends",
            DEADLINE_SECONDS,
        )
        found = running(handle, victim)
        os.kill(found.pid, number)
        killed[victim] = found.incarnation

    for victim in victims:
        running(handle, victim, after=killed[victim])


@pytest.mark.promise("a cluster's workers are killed, and each record counts once")
@pytest.mark.slow
def test_each_record_counts_once_although_every_role_dies_twice(tmp_path: Path) -> None:
    directory, chance = tmp_path / "job", random.Random(11)
    text = Text(directory / "text.txt")
    handle = submit(load_spec(JOB), directory, standby=False)
    try:
        for number in (signal.SIGKILL, signal.SIGTERM):
            end_one_of_each_role(handle, text, chance, number)
        text.end()
        outcome = handle.wait(DEADLINE_SECONDS)
    finally:
        handle.stop()
    assert (outcome.code, outcome.reason) == (0, "done")
    expected_names, expected_table = text.counted()
    names, table = committed(directory)
    assert names == expected_names
    assert (table == expected_table).all()


def test_the_table_learns_which_letter_follows() -> None:
    table = letters.empty_table()
    assert np.isnan(letters.bits(table))
    pairs = letters.draw(letters.tokenize("ababababab"), "source-0", 3, DRAWS)
    assert pairs is not None
    letters.count(table, pairs)
    assert table.sum() == DRAWS
    assert letters.bits(table) == 0.0
    assert letters.draw(letters.tokenize("a"), "source-0", 4, DRAWS) is None
