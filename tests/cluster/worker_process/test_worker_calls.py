"""A worker's calls while news of members comes in another thread."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.cluster.calls.server import CallServer
from counterpoint.cluster.member import Member, Stage
from counterpoint.cluster.worker_process.description import Description
from counterpoint.cluster.worker_process.worker_calls import WorkerCalls
from tests.cluster.calls.workers import Scorer


def test_news_of_members_may_come_while_it_begins_to_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"job": "job", "role": "scorer", "rank": 0, "count": 1, "worker": "scorer-0", "incarnation": 1}
    described = Description(**own, import_path="m:Scorer", directory=str(tmp_path), listen="tcp://127.0.0.1")
    calls, start = WorkerCalls(described), CallServer.start
    member = Member("other-0", 1, Stage.READY, server_key="k" * 40)

    def start_with_news(server: CallServer) -> str:
        calls.update([member])
        return start(server)

    monkeypatch.setattr(CallServer, "start", start_with_news)
    try:
        assert calls.listen(object.__new__(Scorer)).startswith("tcp://127.0.0.1:")
    finally:
        calls.close()
