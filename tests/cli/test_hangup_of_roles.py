"""SIGHUP to a lone server or trainer, as `systemctl reload` sends it, ends neither."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import counterpoint.cli.inference
import counterpoint.cli.trainer
from tests.support.polling import wait_until


@pytest.mark.parametrize(
    ("command", "role", "text"),
    [
        (counterpoint.cli.inference, "counterpoint.inference.server.serve", 'model = "MODEL"\n'),
        (counterpoint.cli.trainer, "counterpoint.cli.trainer.run", 'model = "MODEL"\noutput_dir = "MODEL"\n'),
    ],
)
def test_a_role_goes_on(
    command: object,
    role: str,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def serve(*arguments: object) -> int:
        signal.raise_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP: keys and tokens are read again" in caplog.text, "what the signal means")
        return 7

    file = tmp_path / "role.toml"
    file.write_text(text.replace("MODEL", str(tmp_path)))
    monkeypatch.setattr(role, serve)
    for module, name in (("transport.process.extras", "require"), ("cli.arguments.command", "log_to_stderr")):
        monkeypatch.setattr(f"counterpoint.{module}.{name}", lambda *arguments: None)
        monkeypatch.setattr(command, name, lambda *arguments: None, raising=False)
    monkeypatch.setattr("counterpoint.job.resolve_model.resolve_model", lambda model: model)
    monkeypatch.setattr(command, "resolve_model", lambda model: model, raising=False)
    main: Callable[[list[str]], int] = command.main  # type: ignore[attr-defined]
    assert main([str(file)]) == 7
