"""Source, stages and trainers over two channels, every kind of process killed: each record is committed exactly once."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import msgpack
import pytest

from counterpoint.cluster.channel.config import ChannelConfig
from tests.cluster.channel.actors import RECORDS, first_line, kill, spawn, wait_for
from tests.support.polling import DEADLINE_SECONDS

STAGES = ("stage-0", "stage-1")
TRAINERS = ("trainer-0", "trainer-1")


class Pipeline:
    """Its processes by name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.texts = self.channel("texts", ("source-0",))
        self.tokens = self.channel("tokens", STAGES)
        self.processes: dict[str, subprocess.Popen[str]] = {}
        (directory / "gate").touch()
        for name in ("host-texts", "host-tokens", "source-0", *STAGES, *TRAINERS):
            self.start(name)

    def channel(self, name: str, producers: tuple[str, ...]) -> ChannelConfig:
        journal = self.directory / f"{name}.journal"
        return ChannelConfig(name=name, producers=producers, capacity=24, directory=journal, lease_seconds=4.0)

    def start(self, name: str) -> None:
        match name.split("-")[0]:
            case "host":
                config = self.texts if name == "host-texts" else self.tokens
                self.processes[name] = spawn("host", config, self.directory)
            case "stage":
                self.processes[name] = spawn("stage", self.texts, self.directory, name, self.tokens)
            case "source":
                self.processes[name] = spawn("source", self.texts, self.directory, name)
            case _:
                self.processes[name] = spawn("trainer", self.tokens, self.directory, name)

    def open_gate(self, count: int) -> None:
        with (self.directory / "gate").open("ab") as file:
            file.write(bytes(count))

    def close(self) -> None:
        for process in self.processes.values():
            kill(process)


def committed(directory: Path) -> list[tuple[str, int]]:
    """What all trainers have committed, from their files."""
    records: list[tuple[str, int]] = []
    for name in TRAINERS:
        path = directory / f"{name}.commit"
        if path.exists():
            records += [(origin, position) for origin, position in msgpack.unpackb(path.read_bytes())["state"]]
    return records


@pytest.mark.slow
def test_every_record_is_committed_once_whoever_is_killed(tmp_path: Path) -> None:
    draw = random.Random(11)
    pipeline = Pipeline(tmp_path)
    try:
        for process in pipeline.processes.values():
            if process is not pipeline.processes["source-0"]:
                first_line(process)
        victims = ["host-texts", "host-tokens", "source-0", STAGES[0], TRAINERS[0]]
        draw.shuffle(victims)
        part = RECORDS // (len(victims) + 1)
        for victim in victims:
            before = len(committed(tmp_path))
            pipeline.open_gate(part)
            wait_for(lambda before=before: len(committed(tmp_path)) > before, "records to pass")  # type: ignore[misc]
            kill(pipeline.processes[victim])
            pipeline.start(victim)
        pipeline.open_gate(RECORDS)
        for name in ("source-0", *STAGES, *TRAINERS):
            assert pipeline.processes[name].wait(DEADLINE_SECONDS) == 0, name
    finally:
        pipeline.close()
    expected = [("source-0", position) for position in range(RECORDS) if position % 10 != 9]
    assert sorted(committed(tmp_path)) == expected
