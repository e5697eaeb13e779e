"""The workers of the jobs in `test_003_unified_training.py`, as a reader of document 003 writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import count
from pathlib import Path

from counterpoint.cluster import CallError, Context, DataChannel, Member, SelfLoopWorker, SubMaster, WorkLoad, repeat

WAIT_SECONDS = 0.05


def note(context: Context, line: str) -> None:
    """Adds a line to the worker's file in the job's directory."""
    with (Path(context.directory) / context.worker).open("a") as file:
        file.write(f"{line}\n")


class Counted(WorkLoad):
    """Notes its hooks."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        note(context, "__init__")

    def setup(self) -> None:
        note(self.context, "setup")

    def self_check(self) -> None:
        note(self.context, "self_check")

    def start(self) -> None:
        note(self.context, "start")
        self.context.stop.wait()

    def stop(self) -> None:
        note(self.context, "stop")


class Watcher(SubMaster):
    """Notes whom it checks."""

    def check_child(self, children: Sequence[Member]) -> None:
        note(self.context, f"check_child {' '.join(child.worker for child in children)}")

    def start(self) -> None:
        note(self.context, "start")
        self.context.stop.wait()


class Asker(WorkLoad):
    """Notes the nodes of another role as it is created."""

    def setup(self) -> None:
        nodes = self.context.get_nodes_by_role("helper")
        note(self.context, ", ".join(f"{node.worker} {node.stage}" for node in nodes))

    def start(self) -> None:
        self.context.stop.wait()


class Unfit(WorkLoad):
    """Is not fit."""

    def self_check(self) -> None:
        raise RuntimeError("this node is too slow")


class Count(WorkLoad):
    """Puts lines until it is stopped."""

    def start(self) -> None:
        with DataChannel(self.context.config["output"], self.context).producer().blocking as producer:
            for number in count():
                if self.context.stop.is_set():
                    return
                repeat(partial(producer.send, f"line {number}", timeout=WAIT_SECONDS), self.context.stop)


class Upper(SelfLoopWorker):
    """Makes capitals."""

    def process(self, record: str) -> str:
        return record.upper()


class Faulty(SelfLoopWorker):
    """Makes nothing of anything."""

    def process(self, record: str) -> str:
        raise ValueError(f"no sample of {record.lower()}")


class Drop(SelfLoopWorker):
    """Keeps nothing."""

    def process(self, record: str) -> None:
        pass


class Visitor(WorkLoad):
    """Notes where the ranks of the trainer meet."""

    def start(self) -> None:
        while not self.context.stop.wait(0.5):
            try:
                meeting = self.context.group("trainer-master").call("rendezvous", timeout=10.0).result()
            except CallError:
                continue
            note(self.context, json.dumps(meeting))
