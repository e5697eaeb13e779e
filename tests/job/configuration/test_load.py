"""Layers of configuration, and errors a person can act on."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from counterpoint.inference.config import InferenceConfig
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load, to_toml
from counterpoint.run.config import RunConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.trainer.sft.config import SftConfig
from counterpoint.transport.configuration.schema import keys_of, nearest
from counterpoint.transport.errors import UserError


def edited(job_file: Path, old: str, new: str) -> Path:
    text = job_file.read_text()
    assert old in text
    job_file.write_text(text.replace(old, new))
    return job_file


def complaint(file: Path, *flags: str) -> str:
    with pytest.raises(UserError) as caught:
        load(JobConfig, file, list(flags))
    return str(caught.value)


def test_file_then_environment_then_flags(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(JobConfig, job_file, []).orchestrator.steps == 20
    monkeypatch.setenv("COUNTERPOINT_ORCHESTRATOR__STEPS", "30")
    monkeypatch.setenv("COUNTERPOINT_TRAINER__THREADS", "2")
    config = load(JobConfig, job_file, [])
    assert (config.orchestrator.steps, config.trainer.threads) == (30, 2)
    config = load(JobConfig, job_file, ["--orchestrator.steps", "40", "--orchestrator.training.lora.rank=4"])
    assert (config.orchestrator.steps, config.trainer.threads) == (40, 2)
    assert config.orchestrator.training.lora is not None
    assert config.orchestrator.training.lora.rank == 4


def test_paths_of_keys_count_from_where_they_are_written(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file from the file, in flags and variables from the working directory; and a resolved file keeps them."""
    elsewhere = job_file.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    edited(
        job_file,
        "[inference]",
        '[transport]\nserver_public_key_file = "trainer.key"\n\n[inference]\napi_key_file = "token"',
    )
    monkeypatch.setenv("COUNTERPOINT_TRANSPORT__SECRET_KEY_FILE", "variable.key_secret")
    config = load(JobConfig, job_file, ["--transport.authorized_keys_directory", "flag"])
    assert config.transport.server_public_key_file == job_file.parent / "trainer.key"
    assert config.inference.api_key_file == job_file.parent / "token"
    assert config.transport.secret_key_file == elsewhere / "variable.key_secret"
    assert config.transport.authorized_keys_directory == elsewhere / "flag"
    monkeypatch.delenv("COUNTERPOINT_TRANSPORT__SECRET_KEY_FILE")
    (elsewhere / "resolved.toml").write_text(to_toml(config))
    assert load(JobConfig, elsewhere / "resolved.toml", []) == config


def test_values_of_every_kind_come_through_flags(job_file: Path) -> None:
    config = load(
        JobConfig,
        job_file,
        [
            "--orchestrator.dump_raw_rollouts", "true",
            "--orchestrator.training.betas", "[0.8, 0.9]",
            "--orchestrator.training.loss.kind", "mine:loss",
            "--orchestrator.training.loss.args", '{"delta": 1}',
            "--orchestrator.gather_chunk_size", "null",
            "--inference.extra_args", '["--swap-space", "0"]',
            "--orchestrator.environments", '[{"name": "a", "kind": "guess-number"}]',
        ],
    )  # fmt: skip
    assert config.orchestrator.dump_raw_rollouts is True
    assert config.orchestrator.training.betas == (0.8, 0.9)
    assert config.orchestrator.training.loss.args == {"delta": 1}
    assert config.orchestrator.gather_chunk_size is None
    assert config.inference.extra_args == ["--swap-space", "0"]
    assert [environment.kind for environment in config.orchestrator.environments] == ["guess-number"]


def test_a_resolved_job_loads_to_itself(job_file: Path, tmp_path: Path) -> None:
    config = load(JobConfig, job_file, ["--orchestrator.training.lora.rank", "4"])
    (tmp_path / "resolved.toml").write_text(to_toml(config))
    assert load(JobConfig, tmp_path / "resolved.toml", []) == config


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("steps = 20", "stepps = 20", ["orchestrator.stepps = 20", "unknown key", "nearest is orchestrator.steps"]),
        ("max_tokens = 1024", "max_tokens = 1024\nlearning_rate = 1", ["orchestrator.training.learning_rate"]),
        ("steps = 20", 'steps = 20\ntraining = { schedule = "linear" }', ["nearest is orchestrator.training.lr_schedule"]),
        ('kind = "reverse-text"', 'kind = "reverse-text"\nrtio = 2', ["rtio = 2", "is orchestrator.environments[0].ratio"]),
        ("steps = 20", 'steps = "many"', ["orchestrator.steps = 'many'", "valid integer", "Training steps of the run"]),
        ("steps = 20", "steps = 0", ["orchestrator.steps = 0", "greater than or equal to 1"]),
        ("steps = 20", "steps = 20\ntrace_rollouts = 0.5", ["orchestrator.trace_rollouts: there are no traces", "spans.jsonl"]),
        ("[trainer]", '[alerts]\nurl = "https://x/secret"\n[trainer]', ["alerts: there is none", "deploy/prometheus/alerts.yml"]),
        ('name = "reverse"', 'name = "../up"', ["environments[0].name = '../up'", "expected text that matches"]),
        ('model = "tiny-moe"', "", ["model is required and not set"]),
        ("[trainer]", "[trainer]\nseed = 7", ["trainer.seed = 7 differs from seed = 0", "once, at the top"]),
        ("[trainer]", '[trainer]\ndevice = "tpu"', ["trainer.device = 'tpu'", "'auto', 'cpu' or 'cuda'"]),
        ("max_model_len = 256", "max_model_len = 32", ["leaves no room for a prompt", "max_model_len = 32"]),
        (
            'kind = "reverse-text"',
            'kind = "reverse-text"\nsampling = { max_tokens = 256 }',
            ["orchestrator.environments[0].sampling.max_tokens = 256 leaves no room for a prompt", "max_model_len = 256"],
        ),
        ("max_tokens = 1024", "max_tokens = 128", ["trainer.max_tokens = 128", "could not be trained on"]),
        ("[inference]", "inference = 3\n[other]", ["inference = 3", "other"]),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_told(job_file: Path, old: str, new: str, expected: list[str]) -> None:
    message = complaint(edited(job_file, old, new))
    for part in [str(job_file), *expected]:
        assert part in message


@pytest.mark.parametrize(
    ("old", "new", "place", "line"),
    [
        ("steps = 20", "steps = 0", "13:1", "steps = 0"),
        ('kind = "reverse-text"', "'kind' = \"reverse-text\"\n ratio = -1 # less", "18:2", " ratio = -1 # less"),
        ("max_tokens = 1024", 'text = """\n[max_tokens = 1\n"""\nmax_tokens = 0', "12:1", "max_tokens = 0"),
        ("max_tokens = 32", "max_tokens = 32\n[[orchestrator.environments]]\nname = 'b'\nkind = 3", "23:1", "kind = 3"),
        ("[trainer]", "[trainer]\ncompile = { steps = 1 }\nthreads = 'x'", "10:1", "threads = 'x'"),
        ("[trainer]", "[trainer]\noptimizer = 'a\u2028b\x85c' # \u2029\nthreads = 'x'", "10:1", "threads = 'x'"),
        ("steps = 20", "steps = 20\ntraining = { betas = [0.9,\n 1.5] }", "14:14", "training = { betas = [0.9,"),
    ],
)
def test_the_line_of_what_is_wrong_is_told(job_file: Path, old: str, new: str, place: str, line: str) -> None:
    message = complaint(edited(job_file, old, new))
    assert f"{job_file}:{place}: " in message
    assert f"    {place.partition(':')[0]} | {line}\n" in message


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("max_tokens = 32", "max_tokens = 300", "orchestrator.sampling.max_tokens = 300 leaves no room"),
        ("max_tokens = 1024", "max_tokens = 128", "trainer.max_tokens = 128 is below"),
        ("steps = 20", "steps = 20\ntraining.loss.kind = 'grop'", "training.loss.kind = 'grop': expected one of"),
    ],
)
def test_the_line_of_a_value_that_contradicts_another_is_told(job_file: Path, old: str, new: str, told: str) -> None:
    line = new.rpartition("\n")[2]
    number = edited(job_file, old, new).read_text().split("\n").index(line) + 1
    message = complaint(job_file)
    assert f"\n  {job_file}:{number}:" in message
    assert f": {told}" in message
    assert message.endswith(f"\n    {number} | {line}")


def test_all_errors_come_at_once(job_file: Path) -> None:
    edited(job_file, "steps = 20", "steps = 0\nunheard_of = 1")
    assert "2 errors" in complaint(job_file)


def test_malformed_toml_is_quoted(job_file: Path) -> None:
    edited(job_file, "steps = 20", "steps = = 20")
    message = complaint(job_file)
    assert "this is not TOML" in message
    assert "steps = = 20" in message
    assert "at line 13" in message


def test_the_line_that_is_no_toml_is_counted_as_toml_counts(job_file: Path) -> None:
    edited(job_file, "steps = 20", "note = 'a\u2028b\x85c'\nsteps = = 20")
    assert "\n  14 | steps = = 20" in complaint(job_file)


def test_a_missing_or_unreadable_file_is_told(tmp_path: Path) -> None:
    assert "no such file" in complaint(tmp_path / "nothing.toml")
    assert "cannot be read" in complaint(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b"model = '\xe9'")
    assert "cannot be read" in complaint(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--trainer.treads", "2"], ["there is no key trainer.treads", "did you mean --trainer.threads?"]),
        (
            ["--orchestrator.training.refernce.reward_coefficient", "1"],
            ["did you mean --orchestrator.training.reference.reward_coefficient?"],
        ),
        (["--trainer.threads"], ["a value must follow"]),
        (["word"], ["word: unexpected"]),
        (["--trainer.threads", "-1"], ["--trainer.threads: trainer.threads = '-1'", "greater than or equal to 1"]),
        (
            ["--orchestrator.training.betas", "[1"],
            ["--orchestrator.training.betas = '[1'", "this is not JSON", "list of number"],
        ),
    ],
)
def test_wrong_flags_are_told(job_file: Path, flags: list[str], expected: list[str]) -> None:
    message = complaint(job_file, *flags)
    for part in expected:
        assert part in message


def test_wrong_variables_are_told(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTERPOINT_TRAINER__THREADS", "two")
    assert "COUNTERPOINT_TRAINER__THREADS: trainer.threads = 'two'" in complaint(job_file)
    monkeypatch.setenv("COUNTERPOINT_TRAINER__TREADS", "2")
    assert "did you mean COUNTERPOINT_TRAINER__THREADS?" in complaint(job_file)
    monkeypatch.delenv("COUNTERPOINT_TRAINER__TREADS")
    monkeypatch.setenv("COUNTERPOINT_ORCHESTRATOR__TRAINING__BETAS", "[1")
    message = complaint(job_file)
    assert "environment variable COUNTERPOINT_ORCHESTRATOR__TRAINING__BETAS = '[1'" in message
    assert "this is not JSON" in message
    assert "expected list of number, written as JSON" in message


@pytest.mark.parametrize(
    ("written", "meant"),
    [("ORCHESTRATOR_STEPS", "ORCHESTRATOR__STEPS"), ("TRAINER_MAX_TOKENS", "TRAINER__MAX_TOKENS")],
)
def test_a_single_underscore_between_section_and_key_is_noticed(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, written: str, meant: str
) -> None:
    monkeypatch.setenv(f"COUNTERPOINT_{written}", "3")
    assert f"did you mean COUNTERPOINT_{meant}?" in complaint(job_file)


def test_what_stands_at_the_top_and_belongs_to_a_section_is_one_error(job_file: Path) -> None:
    text = job_file.read_text().replace("[[orchestrator.environments]]", "[[environments]]")
    job_file.write_text("steps = 3\n" + text.replace("[orchestrator.sampling]", "[sampling]"))
    message = complaint(job_file)
    assert "3 errors" in message
    assert "environments belongs under [orchestrator]: write [[orchestrator.environments]]" in message
    assert "sampling belongs under [orchestrator]: write [orchestrator.sampling]" in message
    assert "steps belongs under [orchestrator]: write steps below [orchestrator]" in message
    assert "required" not in message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('model = "tiny-moe"', 'model = "tiny-moe"\nseed = "x"', "seed = 'x'"),
        ("output_dir = ", "output_dir = 7 # ", "expected a path, written as text"),
        (
            'model = "tiny-moe"',
            'model = "tiny-moe"\ntransport = { kind = "carrier pigeon" }',
            "transport.kind = 'carrier pigeon'",
        ),
        (
            'model = "tiny-moe"',
            'model = "tiny-moe"\ntransport = { kind = "filesystem" }',
            'set address = "tcp://0.0.0.0:5555", and keys',
        ),
    ],
)
def test_what_is_wrong_at_the_top_is_not_told_of_each_role_too(
    job_file: Path, old: str, new: str, expected: str
) -> None:
    message = complaint(edited(job_file, old, new))
    assert message.startswith("1 error in the configuration\n")
    assert expected in message


def test_a_kind_that_is_not_known_is_told_with_those_there_are(job_file: Path) -> None:
    message = complaint(job_file, "--orchestrator.filters", '[{"kind": "repitition"}]')
    assert (
        "orchestrator.filters[0]: kind = 'repitition' is not known; expected one of 'gibberish', 'repetition'"
        in message
    )


def test_what_the_roles_share_is_filled_in_from_the_top(job_file: Path) -> None:
    server = ["--inference.port", "8123", "--inference.host", "0.0.0.0", "--inference.api_key_file", "key"]
    config = load(JobConfig, job_file, ["--seed", "5", *server])
    assert config.inference.seed == config.trainer.seed == config.orchestrator.seed == 5
    assert config.trainer.output_dir == config.orchestrator.output_dir == config.output_dir
    everywhere = load(JobConfig, job_file, ["--prometheus_host", "0.0.0.0"])
    assert everywhere.trainer.prometheus_host == everywhere.orchestrator.prometheus_host == "0.0.0.0"
    assert config.orchestrator.inference.urls == ["http://127.0.0.1:8123"]
    assert config.orchestrator.inference.api_key_file == Path("key").absolute()


def test_an_address_that_does_not_fit_the_server_is_refused(job_file: Path) -> None:
    message = complaint(job_file, "--orchestrator.inference.urls", '["http://127.0.0.1:9"]')
    assert "does not fit [inference]" in message


def test_betas_that_adamw_would_refuse_are_refused_first(job_file: Path) -> None:
    """The trainer would meet them only after it has loaded the model, and with a traceback."""
    message = complaint(job_file, "--orchestrator.training.betas", "[0.9, 1.5]")
    assert "orchestrator.training.betas[1] = 1.5" in message
    assert "less than 1" in message


def test_an_adapter_is_served_as_it_is_trained(job_file: Path) -> None:
    config = load(JobConfig, job_file, ["--orchestrator.training.lora.rank", "16"])
    assert config.inference.lora is not None
    assert config.inference.lora.max_rank == 16
    assert "above inference.lora.max_rank = 4" in complaint(
        job_file, "--orchestrator.training.lora.rank", "16", "--inference.lora.max_rank", "4"
    )
    assert "nothing would train an adapter" in complaint(job_file, "--inference.lora.max_rank", "4")


def test_no_gpu_is_named_that_would_stay_idle(job_file: Path) -> None:
    message = complaint(job_file, "--gpus.trainer", "[0, 1, 2]", "--trainer.processes", "2")
    assert "gpus.trainer = [0, 1, 2] are more than trainer.processes = 2" in message
    assert "raise trainer.processes, or name fewer" in message
    load(JobConfig, job_file, ["--gpus.inference", "[0, 1]", "--inference.tensor_parallel_size", "2"])
    message = complaint(job_file, "--gpus.inference", "[0, 1, 2]", "--inference.tensor_parallel_size", "2")
    assert "gpus.inference = [0, 1, 2] are more than inference.tensor_parallel_size = 2" in message


def test_gpus_must_suffice(job_file: Path) -> None:
    load(JobConfig, job_file, ["--gpus.trainer", "[0, 1]", "--trainer.processes", "2"])
    message = complaint(job_file, "--gpus.trainer", "[1]", "--trainer.processes", "2")
    assert "gpus.trainer = [1] are fewer than trainer.processes = 2" in message


CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("name", ["demo", "demo-multi", "demo-real", "distillation", "gpu"])
def test_the_job_files_are_valid(name: str) -> None:
    assert load(JobConfig, CONFIGS / f"{name}.toml", []).output_dir == Path("outputs") / name


def test_the_fine_tuning_file_is_valid() -> None:
    config = load(SftConfig, CONFIGS / "sft.toml", [])
    assert config.trainer.output_dir == config.output_dir == Path("outputs/sft")


def test_the_role_files_are_valid() -> None:
    load(InferenceConfig, CONFIGS / "roles" / "inference.toml", [])
    trainer = load(TrainerConfig, CONFIGS / "roles" / "trainer.toml", [])
    orchestrator = load(RunConfig, CONFIGS / "roles" / "orchestrator.toml", [])
    assert trainer.output_dir == orchestrator.output_dir
    assert trainer.transport == orchestrator.transport


def test_the_lock_covers_every_dependency() -> None:
    """A dependency added without `make lock` would be missing on a fresh machine only. `make demo-real` installs smollm2's."""
    apart = ("gpu", "flash", "smollm2")
    root = CONFIGS.parent
    locked = {line.partition("==")[0] for line in (root / "requirements" / "cpu.lock").read_text().split()}
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(line for name, lines in extras.items() if name not in apart for line in lines),
    ]
    names = {requirement.replace("=", " ").replace(">", " ").replace("[", " ").split()[0] for requirement in wanted}
    assert names - locked == {"counterpoint"}
    assert all("==" in line for line in extras["smollm2"]), "pinned here, since the lock does not have them"


@pytest.mark.parametrize("path", ["orchestrator.training.lr", "training.lr", "lr"])
def test_the_nearest_key_is_the_one_that_is_abbreviated(path: str) -> None:
    assert nearest(path, keys_of(JobConfig)) == "orchestrator.training.learning_rate"
    assert nearest(path, keys_of(RunConfig)) == "training.learning_rate"
    assert nearest("trainer.bs", keys_of(JobConfig)) != "orchestrator.lag.blame_seconds"


DEEP, LONG, HEXADECIMAL = "[" * 100_000 + "]" * 100_000, "1" * 100_000, "0x" + "f" * 100_000


@pytest.mark.parametrize(
    "key", ["steps", "training.betas", "environments", "environments.0.args.x", "training.loss.args"]
)
@pytest.mark.parametrize(
    "value", [DEEP, "[" * 40 + "]" * 40, '{"a":' * 100_000 + "1" + "}" * 100_000, LONG, f"[{LONG}]"]
)
def test_what_exhausts_a_parser_is_told(job_file: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str) -> None:
    """In flags and variables."""
    assert key in complaint(job_file, f"--orchestrator.{key}", value)
    name = f"COUNTERPOINT_ORCHESTRATOR__{key.replace('.', '__').upper()}"
    monkeypatch.setenv(name, value)
    assert len(told := complaint(job_file)) < 2000
    assert name in told


@pytest.mark.parametrize("value", [DEEP, "[" * 40 + "]" * 40, "{ a = " * 1000 + "1" + " }" * 1000, LONG, HEXADECIMAL])
def test_what_exhausts_a_parser_is_told_of_a_file(job_file: Path, value: str) -> None:
    edited(job_file, "steps =", f"other = {value}\nsteps =")
    assert len(told := complaint(job_file)) < 2000
    assert str(job_file) in told


def test_a_text_of_many_lines_delays_no_error(job_file: Path) -> None:
    edited(job_file, "steps =", 'wrong = """' + "\n" * 20_000 + '"""\nsteps =')
    assert "orchestrator.wrong" in complaint(job_file)


def test_a_boolean_is_no_number_in_any_layer(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pydantic takes it as 1 or 0."""
    assert "orchestrator.training.betas[0]" in complaint(job_file, "--orchestrator.training.betas", "[true, 0.9]")
    assert "orchestrator.steps" in complaint(job_file, "--orchestrator.steps", "true")
    monkeypatch.setenv("COUNTERPOINT_ORCHESTRATOR__SCHEDULE", '{"max_lead_steps": true}')
    assert "max_lead_steps" in complaint(job_file)
    monkeypatch.delenv("COUNTERPOINT_ORCHESTRATOR__SCHEDULE")
    edited(job_file, "steps =", "checkpoint_interval = true\nsteps =")
    assert "orchestrator.checkpoint_interval = true" in complaint(job_file)


def test_a_whole_number_is_an_integer_however_it_is_written(job_file: Path) -> None:
    for text in ("1000", "1e3", "1E3", "1000.0"):
        assert load(JobConfig, job_file, ["--orchestrator.steps", text]).orchestrator.steps == 1000
    assert "orchestrator.steps" in complaint(job_file, "--orchestrator.steps", "1.5e0")
    assert load(JobConfig, edited(job_file, "steps = 20", "steps = 2e1"), []).orchestrator.steps == 20
