"""`counterpoint run` prints the links of the page whole, once, and on a terminal alone."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from counterpoint.cli.run import LinksOfThePage
from counterpoint.cluster.worker_view import State, WorkerView
from counterpoint.job.config import JobConfig

TOKEN = "t" * 43
ADDRESS = "http://[fe80::1]:8090/"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_links_are_whole_and_a_log_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    state = tmp_path / "serve"
    state.mkdir()
    for name in ("admin", "read"):
        (state / f"{name}.token").write_text(f"{name}{TOKEN}\n")
    config = JobConfig.model_validate({
        "output_dir": str(tmp_path), "model": "m", "serve": {},
        "orchestrator": {"run_id": "run", "environments": [{"name": "reverse-text", "kind": "reverse-text"}]},
    })  # fmt: skip
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    output = io.StringIO()
    links = LinksOfThePage(config, Console(file=output, width=40))
    for state_of_it in (State.STARTING, State.READY, State.READY):
        links.print_once([WorkerView("serve", state_of_it, 0.0, 1, f"{ADDRESS}; look there")])
    lines = output.getvalue().splitlines()
    for name in ("admin", "read"):
        found = [line for line in lines if line.endswith(f" {ADDRESS}#token={name}{TOKEN}")]
        assert len(found) == is_terminal
    assert (TOKEN in output.getvalue()) == is_terminal
