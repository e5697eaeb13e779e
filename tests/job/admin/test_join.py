"""A guest that joins as a process of its own: it is nobody's child, and what hinders it is told."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from counterpoint.job.admin import join
from counterpoint.job.admin.ask import NotAnswered, NotThere, Refused
from counterpoint.job.directory import orchestrator_of
from counterpoint.run.config import RunConfig
from counterpoint.transport.errors import UserError
from tests.support.polling import wait_until

GUEST = """
import os, signal, sys
from pathlib import Path
from counterpoint.transport.files.lock import take_lock
print("the guest begins", "NOTIFY_SOCKET" in os.environ, "COUNTERPOINT_STEPS" in os.environ, flush=True)
take_lock(Path(sys.argv[1]), "taken")
signal.pause()
"""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    environments = [{"name": "a", "kind": "reverse-text"}]
    values = {"run_id": "guest", "output_dir": tmp_path, "model": "m", "environments": environments}
    return RunConfig.model_validate(values)


def test_a_guest_outlives_whoever_started_it(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "run_guest" / "orchestrator.lock"
    monkeypatch.setattr(join, "command_of", lambda *_: [sys.executable, "-c", GUEST, str(lock)])
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere")
    monkeypatch.setenv("COUNTERPOINT_STEPS", "3")
    joined = join._start(tmp_path, config, tmp_path / "guest.toml", 60.0)
    try:
        assert os.getsid(joined.pid) == joined.pid != os.getsid(0)
        assert joined.log.read_text() == "the guest begins False False\n"
    finally:
        os.kill(joined.pid, signal.SIGKILL)
    wait_until(lambda: orchestrator_of(tmp_path, "guest") is None, "its end")
    wait_until(lambda: not Path(f"/proc/{joined.pid}").exists(), "its end as a zombie")


def test_a_guest_that_does_not_begin_says_why(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    monkeypatch.setattr(join, "command_of", lambda *_: failing)
    with pytest.raises(NotAnswered, match=r"has ended; the end of .*guest\.log:\nno such model"):
        join._start(tmp_path, config, tmp_path / "guest.toml", 60.0)
    with pytest.raises(NotThere, match="holds no job"):
        join.join_run(tmp_path, "")


def test_a_file_that_is_wrong_is_named_as_its_sender_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "require_job", lambda job: None)
    monkeypatch.setattr(join, "values_of_job", lambda job: {})
    with pytest.raises(UserError, match=r"^the run's file: this is not TOML"):
        join.join_run(tmp_path, "steps = ")
    with pytest.raises(UserError, match=r"(?s)^2 errors.*mine\.toml:1:1: stpes = 3"):
        join.join_run(
            tmp_path, "stpes = 3\nenvironments = [{ name = 'a', kind = 'reverse-text' }]\nmodel = 'm'", name="mine.toml"
        )
    with pytest.raises(UserError, match=r"^mine\.toml: .*`counterpoint run`; expected a run's"):
        join.join_run(tmp_path, 'model = "tiny-dense"\n[trainer]\n[orchestrator]\nsteps = 1', name="mine.toml")
    assert not list((tmp_path / "guests").iterdir())


@pytest.mark.slow
def test_an_environment_that_is_not_there_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "require_job", lambda job: None)
    monkeypatch.setattr(join, "values_of_job", lambda job: {})
    monkeypatch.setattr(join, "check_joins", lambda config, job: None)
    monkeypatch.setattr(join, "allowed_imports", lambda job: ["counterpoint.environments.tasks.reverse_text:Reverse"])
    text = f"""
run_id = "guest"
output_dir = "{tmp_path}"
model = "m"
environments = [{{ name = "a", kind = "counterpoint.environments.tasks.reverse_text:Reverse" }}]
"""
    with pytest.raises(UserError, match=r"has no class 'Reverse'; did you mean 'ReverseText'"):
        join.join_run(tmp_path, text)
    assert not list((tmp_path / "guests").iterdir())
    assert not (tmp_path / "run_guest").exists()


def test_one_of_two_who_join_a_run_at_once_is_refused(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the process of the one would begin from the file of the other."""
    replaced: dict[str, object] = {"require_job": None, "_load": config, "allowed_imports": []}
    for name, value in replaced.items():
        monkeypatch.setattr(join, name, lambda *_, value=value: value)
    for name in ("check_joins", "check_imports"):
        monkeypatch.setattr(join, name, lambda *_, **__: None)
    texts: list[str] = []

    def start(job: Path, config: RunConfig, file: Path, timeout: float) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(join, "_start", lambda *_: None)
            with pytest.raises(Refused, match=r"run guest is being joined to .* already"):
                join.join_run(tmp_path, "the other's")
        texts.append(file.read_text())

    monkeypatch.setattr(join, "_start", start)
    for text in ("mine", "mine, later"):
        join.join_run(tmp_path, text)
    assert texts == ["mine", "mine, later"]
