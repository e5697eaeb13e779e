"""What a job names on this machine and is not there is refused by a dry run, with key and value, as `run` would refuse it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from counterpoint.cli.main import main
from tests.orchestrator.toy_model import make_toy_model

ROWS = json.dumps({"data": {"path": "gone.jsonl"}, "rubric": [{"kind": "math"}]})

SERVERS = ["--inference.replicas", "0", "--orchestrator.inference.urls", '["https://127.0.0.1:9"]']

TEACHER = json.dumps({"urls": ["http://127.0.0.1:9"], "api_key_file": "/gone/token"})


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--model", "./gone"],
            "--model: model = './gone': there is no such directory; expected a directory, a built-in",
        ),
        (["--model", "/gone/far/away"], "--model: model = '/gone/far/away': there is no such directory"),
        (
            ["--inference.api_key_file", "/gone/token"],
            "inference.api_key_file = '/gone/token': cannot be read: No such",
        ),
        (
            [*SERVERS, "--orchestrator.inference.api_key_file", "/gone/token"],
            "inference.api_key_file = '/gone/token': ",
        ),
        (
            [*SERVERS, "--orchestrator.inference.ca_file", "/gone/ca.pem"],
            "inference.ca_file = '/gone/ca.pem': No such file",
        ),
        (
            ["--orchestrator.teacher", TEACHER, "--orchestrator.training.loss.kind", "distillation"],
            "teacher.api_key_file = '/gone/token': cannot be read",
        ),
        (
            ["--transport.secret_key_file", "/gone/key", "--transport.server_public_key_file", "/gone/public"],
            "transport.server_public_key_file: ",
        ),
        (
            ["--inference.extra_args", '["--chat-template=/gone.jinja"]'],
            "--chat-template = '/gone.jinja': there is no such file",
        ),
        (
            ["--inference.extra_args", '["--ssl_keyfile", "gone.key"]'],
            "--ssl-keyfile = 'gone.key': there is no such file",
        ),
        (
            ["--orchestrator.environments.0.kind", "single-turn", "--orchestrator.environments.0.args", ROWS],
            "data: gone.jsonl: No such file",
        ),
        (["--orchestrator.training.lora", '{"rank": 8, "start_from": "/gone"}'], "training.lora.start_from = '/gone'"),
    ],
)
def test_a_dry_run_refuses_what_is_not_there(
    job_file: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    before = sorted(job_file.parent.iterdir())
    assert main(["run", str(job_file), "--dry-run", *flags]) == 2
    output, error = capsys.readouterr()
    assert said in error
    assert not output
    assert sorted(job_file.parent.iterdir()) == before, "nothing is written"


def test_a_dry_run_takes_what_is_there(job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "config.json").write_text("{}")
    here = {
        "model": str(make_toy_model(tmp_path)),
        "inference.api_key_file": str(tmp_path / "token"),
        "inference.extra_args": json.dumps(
            [
                f"--chat-template={tmp_path / 'token'}",
                "--chat-template",
                "{{ messages }}/",
                "--chat_template=builtin.jinja",
            ]
        ),
    }
    flags = [f"--{key}={value}" for key, value in here.items()]
    assert main(["run", str(job_file), "--dry-run", *flags]) == 2
    assert f"model = '{tmp_path}': there are no weights in that directory" in capsys.readouterr().err
    (tmp_path / "model.safetensors").touch()
    assert main(["run", str(job_file), "--dry-run", *flags]) == 0
    assert "secret" not in capsys.readouterr().out
    kwargs = ["--orchestrator.sampling.chat_template_kwargs", '{"openning": "Hm"}']
    assert main(["run", str(job_file), "--dry-run", *flags, *kwargs]) == 2
    assert "does not read 'openning'" in capsys.readouterr().err


def test_a_dry_run_compares_the_adapter_that_a_run_begins_with(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16.0}))
    lora = {"rank": 8, "alpha": 32.0, "start_from": str(tmp_path)}
    assert main(["run", str(job_file), "--dry-run", "--orchestrator.training.lora", json.dumps(lora)]) == 2
    assert "the adapter has lora_alpha = 16.0, and training.lora.alpha = 32" in capsys.readouterr().err


def test_a_job_on_ray_names_files_of_its_nodes(job_file: Path) -> None:
    flags = ["--inference.api_key_file", "/gone/token", "--backend", "ray"]
    assert main(["run", str(job_file), "--dry-run", *flags]) == 0
    assert main(["run", str(job_file), "--dry-run", *flags, "--model", "./gone"]) == 2, (
        "it is found where the command runs"
    )


def test_a_dry_run_of_an_orchestrator_refuses_what_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "run.toml"
    file.write_text(f"""
run_id = "own"
output_dir = "{tmp_path / "out"}"
model = "{make_toy_model(tmp_path)}"
environments = [{{name = "words", kind = "reverse-text"}}]
inference.urls = ["http://127.0.0.1:9"]
inference.api_key_file = "{tmp_path / "token"}"
""")
    assert main(["orchestrator", str(file), "--dry-run"]) == 2
    assert f"inference.api_key_file = '{tmp_path / 'token'}': cannot be read" in capsys.readouterr().err
    (tmp_path / "token").write_text("secret")
    assert main(["orchestrator", str(file), "--dry-run", "--model", "./gone"]) == 2
    assert "model = './gone': there is no such directory" in capsys.readouterr().err
    assert main(["orchestrator", str(file), "--dry-run"]) == 0, capsys.readouterr().err
