"""What is checked before a run: operators' code that never finishes loading ends in an error, and nothing of it stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import orjson
import pytest

import counterpoint.job.check
from counterpoint.job.check import check_fit, check_imports, check_memory, check_runs
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load
from counterpoint.job.resolve_model import check_model, resolve_model
from counterpoint.run.config import RunConfig
from counterpoint.run.trained import LoraConfig
from counterpoint.transport.errors import Obstructed, UserError
from counterpoint.transport.process.resident import available_bytes
from tests.orchestrator.toy_model import make_toy_model


@pytest.mark.slow
def test_an_advantage_of_the_wrong_length_is_found_before_anything_starts(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short_advantage.py").write_text(
        "print('hello')\n"
        "from counterpoint.orchestrator.step.advantages import AdvantageOutputs\n\n\n"
        "def advantage(inputs):\n    return AdvantageOutputs([1.0])\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    config = load(JobConfig, job_file, ["--orchestrator.advantage.kind", "short_advantage:advantage"])
    with pytest.raises(UserError, match=r"^advantage\.kind = .*'short_advantage:advantage' returned 1 "):
        check_imports([config.orchestrator])


def test_a_template_variable_that_the_model_does_not_know_is_refused_before_anything_starts(
    job_file: Path, tmp_path: Path
) -> None:
    model = make_toy_model(tmp_path)
    (model / "config.json").write_text("{}")

    def job(**kwargs: Any) -> JobConfig:
        given = ["--orchestrator.environments.0.sampling.chat_template_kwargs", orjson.dumps(kwargs).decode()]
        return load(JobConfig, job_file, given).with_model(model)

    check_fit(job(opening="Hm"))
    with pytest.raises(UserError, match=r"environment .*: .* does not read 'openning'; did you mean 'opening'\?"):
        check_fit(job(openning="Hm"))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_of_turn_that_the_vocabulary_lacks_is_refused_before_anything_starts(
    name: str, job_file: Path, tmp_path: Path
) -> None:
    model = make_toy_model(tmp_path)
    (model / "config.json").write_text('{"vocab_size": 300}')
    job = load(JobConfig, job_file, []).with_model(model)
    (model / name).write_text('{"vocab_size": 300, "eos_token_id": [0, 299]}')
    check_fit(job)
    (model / name).write_text('{"vocab_size": 300, "eos_token_id": [0, 300]}')
    with pytest.raises(UserError, match=r"eos_token_id = 300 in .* is not among the 300 tokens"):
        check_fit(job)


def test_min_p_with_speculative_decoding_is_refused_before_anything_starts(job_file: Path) -> None:
    draft = ["--inference.extra_args", '["--speculative-config={}"]']
    load(JobConfig, job_file, draft)
    with pytest.raises(UserError, match=r"sampling\.min_p = 0.1: .*speculative"):
        load(JobConfig, job_file, [*draft, "--orchestrator.sampling.min_p", "0.1"])


def test_a_context_above_the_models_own_is_refused_before_anything_starts(job_file: Path, tmp_path: Path) -> None:
    model = make_toy_model(tmp_path)
    (model / "config.json").write_text('{"max_position_embeddings": 512}')

    def check(*flags: str) -> None:
        check_fit(load(JobConfig, job_file, ["--inference.max_model_len", "513", *flags]).with_model(model))

    with pytest.raises(UserError, match=r"^inference: max_model_len = 513: .* 512 tokens"):
        check()
    check("--inference.max_model_len", "512")
    check("--inference.replicas", "0", "--orchestrator.inference.urls", '["http://127.0.0.1:9"]')


def test_more_memory_for_caches_than_there_is_is_refused_before_anything_starts(
    job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counterpoint.job.check, "available_bytes", lambda: 10 * 2**30)
    monkeypatch.setattr(counterpoint.job.check, "on_cpu", lambda: True)

    def check(*flags: str) -> None:
        check_memory(load(JobConfig, job_file, [*flags]).inference)

    check("--inference.kv_cache_gib", "10")
    check()
    for flags in (["11"], ["6", "--inference.replicas", "2"]):
        with pytest.raises(Obstructed, match=r"^inference\.kv_cache_gib = (11|6): .* 10\.0 GiB"):
            check("--inference.kv_cache_gib", *flags)
    monkeypatch.setattr(counterpoint.job.check, "on_cpu", lambda: False)
    check("--inference.kv_cache_gib", "11")
    assert 2**20 < (available_bytes() or 0) < 2**50


def test_tools_that_no_server_parses_are_refused_before_anything_starts(job_file: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "2 + 2", "answer": "4"}\n')
    arguments = {"tools": ["calculator"], "data": {"path": str(rows)}, "rubric": [{"kind": "math"}]}
    tools = [
        *("--orchestrator.environments.0.kind", "tools"),
        *("--orchestrator.environments.0.args", orjson.dumps(arguments).decode()),
    ]
    with pytest.raises(UserError, match=r"^environments\[0\]: environment '.*': kind = 'tools' has tools"):
        check_runs(load(JobConfig, job_file, tools))
    for parsed in (["--inference.tool_parser", "hermes"], ["--inference.extra_args", '["--tool-call-parser=hermes"]']):
        check_runs(job := load(JobConfig, job_file, [*tools, *parsed]))
    # A model whose template cannot be given any, or the results of two calls.
    model = make_toy_model(tmp_path / "model")
    for template, wrong in (
        ("{{ messages[0].content }}", "does not read `tools`"),
        (ONE_RESULT, "No.*what follows 2 calls"),
    ):
        (model / "chat_template.jinja").write_text(template)
        with pytest.raises(UserError, match=rf"^environments\[0\]: environment '.*': .*{wrong}"):
            check_runs(job.with_model(model))


ONE_RESULT = (
    "{{ tools }}{% for m in messages %}{{ m.role }}{{ m.content }}"
    "{% if m.role == 'tool' and loop.previtem.role == 'tool' %}{{ raise_exception('No') }}{% endif %}{% endfor %}"
)


def test_a_template_that_drops_what_messages_say_is_refused_before_anything_starts(
    job_file: Path, tmp_path: Path
) -> None:
    model = make_toy_model(tmp_path)
    (model / "config.json").write_text("{}")
    job = load(JobConfig, job_file, []).with_model(model)
    check_fit(job)
    parts = "{% for m in messages %}{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(parts)
    with pytest.raises(UserError, match=r"drops the text of role user of messages\[0\]"):
        check_fit(job)


@pytest.mark.slow
def test_an_operators_environment_with_tools_that_no_server_parses_is_refused(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sums_with_tools.py").write_text(
        "from counterpoint.environments import Example\n"
        "from counterpoint.environments.tools.environment import ToolEnvironment\n\n\n"
        "class Sums(ToolEnvironment):\n"
        "    def __init__(self):\n        super().__init__(tools=['calculator'])\n\n"
        "    def __len__(self):\n        return 1\n\n"
        "    def example(self, index):\n        return Example(prompt='2 + 2', answer='4')\n\n"
        "    async def reward(self, example, rollout, answer):\n        return 1.0\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    kind = ["--orchestrator.environments.0.kind", "sums_with_tools:Sums"]
    with pytest.raises(UserError, match=r"kind = 'sums_with_tools:Sums' has tools"):
        check_runs(load(JobConfig, job_file, kind))
    check_runs(load(JobConfig, job_file, [*kind, "--inference.tool_parser", "hermes"]))


@pytest.mark.slow
@pytest.mark.parametrize(("error", "code"), [("refused", 75), ("absent", 2)])
def test_a_service_that_does_not_answer_yet_is_no_bad_configuration(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, error: str, code: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    environment = {"kind": "tests.orchestrator.toy_environment:Unready", "args": {"when": "made", "error": error}}
    flags = [
        word for key, value in environment.items() for word in (f"--orchestrator.environments.0.{key}", _text(value))
    ]
    with pytest.raises(UserError, match=r"^environments\[0\]: environment '.*': args = ") as raised:
        check_imports([load(JobConfig, job_file, flags).orchestrator])
    assert raised.value.code == code


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def test_what_a_run_begins_with_is_missed_before_anything_starts(job_file: Path, tmp_path: Path) -> None:
    given = ["--orchestrator.training.lora.start_from", str(tmp_path / "gone"), "--inference.lora.max_rank", "8"]
    with pytest.raises(UserError, match=r"training\.lora\.start_from = '.*gone': .*adapter_config\.json"):
        check_runs(load(JobConfig, job_file, given))
    check_runs(load(JobConfig, job_file, [*given, "--resume", "true"]))
    (tmp_path / "gone").mkdir()
    lora = LoraConfig()
    described = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.alpha}
    (tmp_path / "gone" / "adapter_config.json").write_bytes(orjson.dumps(described))
    check_runs(load(JobConfig, job_file, given))
    reference = ["--orchestrator.training.reference.model", str(tmp_path)]
    with pytest.raises(UserError, match=r"training\.reference\.model = .*: there is no config\.json"):
        check_runs(load(JobConfig, job_file, reference))


@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_stock_server_without_an_adapter_is_refused(lora: dict[str, int] | None) -> None:
    values: dict[str, Any] = {
        "output_dir": "job",
        "model": "tiny-dense",
        "environments": [{"name": "words", "kind": "reverse-text"}],
        "inference": {"protocol": "openai"},
        "training": {"lora": lora},
    }
    if lora is not None:
        RunConfig.model_validate(values)
        return
    with pytest.raises(ValueError, match=r"inference\.protocol = 'openai' without training\.lora"):
        RunConfig.model_validate(values)


@pytest.mark.slow
def test_a_module_that_waits_while_it_is_imported_is_named(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "nobody_writes"
    os.mkfifo(fifo)
    (tmp_path / "waiting.py").write_text(f"open({str(fifo)!r})\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.getcwd()}")
    monkeypatch.setattr(counterpoint.job.check, "CHECK_SECONDS", 5.0)
    config = load(JobConfig, job_file, ["--orchestrator.advantage.kind", "waiting:advantage"])
    with pytest.raises(UserError, match="waiting:advantage: not loaded within 5 s"):
        check_imports([config.orchestrator])
    with pytest.raises(OSError, match="No such device or address"):  # which says that the child waits there no longer
        os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_of_a_model_that_may_not_be_read_is_refused_as_that(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since safetensors would say that it does not exist."""
    for file in ("config.json", "model.safetensors", "tokenizer.json", "notes.txt"):
        (tmp_path / file).touch()
    check_model(str(tmp_path))

    def refuse(path: Path, *arguments: Any) -> Any:
        if path.name in (name, "notes.txt"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return path_open(path, *arguments)

    path_open = Path.open
    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    for asked in (check_model, resolve_model):
        with pytest.raises(UserError, match=f"{name} cannot be read by user {os.geteuid()}: Permission denied"):
            asked(str(tmp_path))
