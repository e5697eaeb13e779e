"""Workers for the tests."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.worker import Context, Member, Worker


class Plain(Worker):
    """Says which hooks are called."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        print("hook __init__")

    def setup(self) -> None:
        print("hook setup")

    def self_check(self) -> None:
        print("hook self_check")

    def status(self) -> str:
        return "fine"

    def start(self) -> None:
        print("hook start")

    def stop(self) -> None:
        print("hook stop")

    def on_failover(self, failed: Sequence[Member]) -> None:
        print("hook on_failover")
