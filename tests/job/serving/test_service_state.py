"""The console and the summary say what the service for the Tinker SDK does, by what a real one leaves on the disk."""

from __future__ import annotations

import asyncio
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from counterpoint.cli.display.progress import LiveProgress, PlainProgress
from counterpoint.cli.display.summary_tables import print_summary
from counterpoint.job.reading.summary import summarize_runs
from counterpoint.job.serving.service_state import service_in_words, summarize_service
from counterpoint.service.keys import digest
from counterpoint.service.records.structs import ModelRecord, SavedRecord, run_of
from counterpoint.service.tinker.bodies import CreateSession
from counterpoint.service.tinker.futures import FutureResult, answer
from counterpoint.service.tinker.status import status_of, write_status
from tests.service.serving import KEYS, serving


def test_a_service_without_a_client_is_no_error(tmp_path: Path) -> None:
    assert service_in_words(tmp_path) == "no client yet"
    assert summarize_service(tmp_path)["updates"] == 0


async def test_models_updates_pending_requests_and_weights_are_said(tmp_path: Path) -> None:
    async def never() -> FutureResult:
        await asyncio.Event().wait()
        return answer()

    owner = digest(KEYS[0]).hex()
    async with serving(tmp_path) as (_, service):
        session = await service.create_session(CreateSession(), owner)
        names = [f"{session.session_id}:train:{number}" for number in range(2)]
        for name in names:
            service.store.write(ModelRecord(name, run_of(name), owner, 4, []))
        service.store.write(SavedRecord(names[0], "weights", "first", 1, 3))
        run = SimpleNamespace(updates=19, reason="")
        model = SimpleNamespace(run=run, record=SimpleNamespace(owner=owner), saving=(), close=lambda: asyncio.sleep(0))
        service._models[names[0]] = service._models[names[1]] = cast(Any, model)
        await service._shut(names[1])
        for number in range(5):
            service.results.begin(f"{session.session_id}:sample:0:{number}", owner, never)
        service.results.of(owner)._since[f"{session.session_id}:sample:0:0"] = time.time() - 70
        write_status(status_of(service), service.store)
        said = service_in_words(tmp_path)
        summary = summarize_service(tmp_path)
        service._models.clear()
    assert "2 models, 1 open" in said
    assert "38 updates" in said
    assert "5 requests pending" in said
    assert f"{session.session_id}:sample:0:0" in said
    assert summary["models"][names[0]]["weights"] == f"tinker://{names[0]}/weights/first"
    assert summary["models"][names[0]]["directory"].endswith(f"trainer/{run_of(names[0])}/saved/step_3")
    assert summary["models"][names[1]] == {"updates": 19, "is_open": False, "weights": None, "directory": None}
    assert (summary["pending"], summary["oldest"]["request"]) == (5, f"{session.session_id}:sample:0:0")
    assert 69 < summary["oldest"]["seconds"] < 3600

    shown = StringIO()
    whole = summarize_runs([], {}, tmp_path, 61.0, "stopped") | {"service": summary}
    print_summary(whole, {}, Console(file=shown, width=300))
    for text in (names[0], "19", f"tinker://{names[0]}/weights/first", "38 updates; 5 requests pending", "stopped"):
        assert text in shown.getvalue()
    assert "lag p99" not in shown.getvalue(), "there is no run, so there is no table of runs"


def test_the_console_says_what_the_service_does_where_there_is_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.cli.display.progress.HEARTBEAT_SECONDS", -1.0)
    for kind, is_terminal in ((PlainProgress, False), (LiveProgress, True)):
        shown = StringIO()
        progress = kind(Console(file=shown, force_terminal=is_terminal, width=200), {}, tmp_path)
        progress.update([], [])
        progress.close()
        assert "no client yet" in shown.getvalue()
        assert "no run" not in shown.getvalue()
