"""`counterpoint env`: its words, and its errors before any server starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.main import main


def test_its_help_names_both_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--help"]) == 0
    assert "counterpoint env check KIND" in capsys.readouterr().out


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "chek"]) == 2
    assert "there is no command 'chek'; there are check, new and serve" in capsys.readouterr().err


def test_a_new_environment_says_how_to_check_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "new", "my_task", "--directory", str(tmp_path)]) == 0
    assert f"PYTHONPATH={tmp_path} counterpoint env check my_task:MyTask" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["singel-turn", "tools"])
def test_an_environment_that_cannot_be_loaded_is_refused_before_a_model_is_resolved(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("job.resolve_model.resolve_model", lambda name: pytest.fail("a model was resolved"))
    assert main(["env", "check", kind]) == 2
    assert "environment 'checked': " in capsys.readouterr().err


@pytest.mark.parametrize("given", ["[1]", "{"])
def test_arguments_that_are_no_table(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["env", "check", "reverse-text", "--args", given])
    assert "JSON" in capsys.readouterr().err
