"""Workers for the tests."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from counterpoint.cluster.calls.remote import remote
from counterpoint.cluster.worker import Context, Member, SubMaster, Worker

logger = logging.getLogger(__name__)


def say(hook: str) -> None:
    """Says which hook runs. In one write, since hooks run in several threads, and `print` makes two."""
    sys.stdout.write(f"hook {hook}\n")


class Plain(Worker):
    """Says which hooks are called."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        say("__init__")

    def setup(self) -> None:
        say("setup")

    def self_check(self) -> None:
        say("self_check")

    def status(self) -> str:
        return "fine"

    def start(self) -> None:
        say("start")
        logger.info("a line for people")

    def stop(self) -> None:
        say("stop")

    @remote
    def double(self, number: int) -> int:
        return 2 * number

    def on_failover(self, failed: Sequence[Member]) -> None:
        say(" ".join(["on_failover", *(f"{member.worker} {member.incarnation}" for member in failed)]))


class Underscored(Worker):
    """Has the hooks of INIT by their names in state diagrams."""

    def _setup(self) -> None:
        say("_setup")

    def _self_check(self) -> None:
        say("_self_check")
        raise RuntimeError("unfit")


class Leaving(Worker):
    """Returns from `start` with something open, or not."""

    def start(self) -> None:
        self.context.left_open["its stream"] = lambda: bool(self.context.config["open"])


class Leader(SubMaster):
    """Says what it knows of its children, and asks for the end of the job."""

    def check_child(self, children: Sequence[Member]) -> None:
        known = self.context.get_nodes_by_role(self.context.role)
        say(f"check_child {_names(children)}; known {_names(known)}")
        self.context.stop_job("checked")


class Asker(Worker):
    """Calls another role."""

    def start(self) -> None:
        say(f"told {self.context.group('plain').call('double', 21, rank=0).result()}")


class FailsInSetup(Worker):
    def setup(self) -> None:
        raise ValueError("no such model: tiny")


class ExitsInStart(Worker):
    def start(self) -> None:
        sys.exit(5)


def _names(members: Sequence[Member]) -> str:
    return " ".join(member.worker for member in members)


class Failing(Worker):
    """Raises in the hook that its config names, or exits."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        if context.config.get("thread"):
            threading.Thread(target=threading.Event().wait, name="left").start()
        self._reach("__init__")

    def setup(self) -> None:
        self._reach("setup")

    def self_check(self) -> None:
        self._reach("self_check")

    def status(self) -> str:
        self._reach("status")
        return ""

    def start(self) -> None:
        self._reach("start")

    def stop(self) -> None:
        self._reach("stop")

    def on_failover(self, failed: Sequence[Member]) -> None:
        self._reach("on_failover")

    def _reach(self, hook: str) -> None:
        if self.context.config["hook"] == hook:
            if "exit" in self.context.config:
                sys.exit(self.context.config["exit"])
            raise RuntimeError(f"in {hook}" + ("\udcff" if self.context.config.get("unsendable") else ""))


class SlowSetup(Worker):
    def setup(self) -> None:
        say("setup")
        self.context.stop.wait()
        say("setup ended")

    def stop(self) -> None:
        say("stop")


class Patient(Worker):
    def start(self) -> None:
        self.context.stop.wait()
        say("start saw the stop")

    def stop(self) -> None:
        say("stop")


class SlowStop(Worker):
    """Has nothing to do, and stops once a file is there."""

    def stop(self) -> None:
        say("stop")
        while not (Path(self.context.directory) / "go on").exists():
            threading.Event().wait(0.01)
        say(f"stop {'saw' if self.context.stop.is_set() else 'did not see'} context.stop")
