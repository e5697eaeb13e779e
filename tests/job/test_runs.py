"""`[[runs]]` in a job's file: what each run inherits, what is derived from all of them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from counterpoint.inference.config import InferenceConfig
from counterpoint.job.admin.reload import Reload
from counterpoint.job.config import JobConfig
from counterpoint.job.configuration.load import load, to_toml
from counterpoint.job.workers import sections_of, specification
from counterpoint.run.loss import KINDS
from counterpoint.transport.errors import UserError

RUNS = """
output_dir = "{output_dir}"
model = "tiny-dense"
seed = 3

[inference]
max_model_len = 256

[trainer]
max_tokens = 1024

[orchestrator]
steps = 20
sampling = {{ max_tokens = 32, temperature = 0.9 }}

[[orchestrator.environments]]
name = "reverse"
kind = "reverse-text"

[orchestrator.training]
learning_rate = 1e-4
lora = {{ rank = 4 }}

[[runs]]
run_id = "plain"

[[runs]]
run_id = "quick"
steps = 10
training = {{ learning_rate = 1e-3, lora = {{ rank = 16 }} }}
sampling = {{ max_tokens = 16 }}

[[runs]]
run_id = "guess"
seed = 4

[[runs.environments]]
name = "guess"
kind = "guess-number"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "runs.toml"
    path.write_text(RUNS.format(output_dir=tmp_path / "out"))
    return path


def complaint(file: Path, old: str, new: str, *flags: str) -> str:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        load(JobConfig, file, list(flags))
    return str(caught.value)


def test_a_run_has_what_all_have_and_what_is_its_own(file: Path) -> None:
    plain, quick, guess = load(JobConfig, file, []).every_run
    assert (plain.steps, quick.steps, guess.steps) == (20, 10, 20)
    assert (quick.sampling.max_tokens, quick.sampling.temperature) == (16, 0.9)
    assert [run.training.lora and run.training.lora.rank for run in (plain, quick, guess)] == [4, 16, 4]
    assert quick.training.learning_rate == 1e-3
    assert [environment.name for environment in guess.environments] == ["guess"], "lists are replaced"
    assert [environment.name for environment in quick.environments] == ["reverse"]
    assert (plain.seed, guess.seed) == (3, 4)
    assert plain.run_dir != quick.run_dir
    assert quick.run_dir.parent == plain.run_dir.parent


def test_a_flag_changes_what_the_runs_share(file: Path) -> None:
    runs = load(JobConfig, file, ["--orchestrator.steps", "5", "--orchestrator.training.weight_decay", "0.1"]).every_run
    assert [run.steps for run in runs] == [5, 10, 5], "what a run says of itself stays"
    assert {run.training.weight_decay for run in runs} == {0.1}


def test_what_servers_and_trainer_need_is_derived_from_all_runs(file: Path) -> None:
    job = load(JobConfig, file, [])
    assert job.trainer.max_runs == 3
    assert job.trainer.stay
    assert job.inference.lora is not None
    assert job.inference.lora.max_rank == 16
    assert job.inference.lora.max_adapters >= 3
    assert load(JobConfig, file, ["--trainer.max_runs", "2"]).trainer.max_runs == 2
    job = load(JobConfig, file, ["--trainer.max_runs", "9"])
    assert job.inference.lora is not None
    assert job.inference.lora.max_adapters == 9, "those who join need a slot, too"


def test_several_servers_are_known_to_every_run(file: Path) -> None:
    job = load(JobConfig, file, ["--inference.replicas", "2", "--inference.port", "8100", "--gpus.inference", "[2, 5]"])
    urls = ["http://127.0.0.1:8100", "http://127.0.0.1:8101"]
    assert [run.inference.urls for run in job.every_run] == [urls] * 3
    sections = sections_of(job)
    assert list(sections) == [
        "inference_0", "inference_1", "trainer", "orchestrator_plain", "orchestrator_quick", "orchestrator_guess"
    ]  # fmt: skip
    second = sections["inference_1"]
    assert isinstance(second, InferenceConfig)
    assert (type(second), second.port, second.lora) == (InferenceConfig, 8101, job.inference.lora)
    workers = {worker.name: worker for worker in specification(job, dict.fromkeys(sections, file)).roles}
    assert list(workers) == list(sections)
    assert [workers[name].environment["CUDA_VISIBLE_DEVICES"] for name in ("inference_0", "inference_1")] == ["2", "5"]
    assert [name for name, worker in workers.items() if worker.task] == list(sections)[3:]
    assert {worker.max_restarts for worker in workers.values()} == {3}
    assert "gpus.inference = [1] are fewer than inference.tensor_parallel_size x inference.replicas = 2" in complaint(
        file, "max_model_len", "replicas = 2\nmax_model_len", "--gpus.inference", "[1]"
    )


def test_a_job_may_use_servers_that_run_already(file: Path) -> None:
    file.write_text(
        file.read_text().replace("[inference]", "[inference]\nreplicas = 0")
        + '\n[orchestrator.inference]\nurls = ["https://gpu.example:8443"]\nprotocol = "openai"\napi_key_file = "key"\n'
    )
    job = load(JobConfig, file, ["--gpus.trainer", "[0]"])
    assert {tuple(run.inference.urls) for run in job.every_run} == {("https://gpu.example:8443",)}
    assert {run.inference.protocol for run in job.every_run} == {"openai"}
    assert {run.inference.api_key_file for run in job.every_run} == {file.parent / "key"}
    assert list(sections_of(job)) == ["trainer", "orchestrator_plain", "orchestrator_quick", "orchestrator_guess"]
    workers = specification(job, dict.fromkeys(sections_of(job), file)).roles
    assert [worker.name for worker in workers] == list(sections_of(job))
    job = load(
        JobConfig, file, ["--orchestrator.inference.urls", "[]", "--orchestrator.inference.dns", "http://vllm:8000"]
    )
    assert {run.inference.dns for run in job.every_run} == {"http://vllm:8000"}


def test_a_job_without_servers_must_say_where_they_are(file: Path) -> None:
    assert (
        "inference.replicas = 0 starts no server, and orchestrator.inference names none that runs already"
        in complaint(file, "[inference]", "[inference]\nreplicas = 0")
    )


def test_the_trainer_proves_weights_for_the_precision_of_the_jobs_own_servers(file: Path) -> None:
    every = ["float32", "bfloat16", "float16"]
    own = ["--inference.dtype", "bfloat16"]
    elsewhere = ["--inference.replicas", "0", "--orchestrator.inference.urls", '["http://127.0.0.1:8000"]']
    for flags, expected in (
        (own, ["bfloat16"]),
        (["--inference.dtype", "auto"], every),
        ([*own, "--inference.extra_args", '["--dtype=float16"]'], every),
        ([*own, *elsewhere], every),
        ([*own, "--trainer.server_dtypes", '["bfloat16", "float16"]'], ["bfloat16", "float16"]),
    ):
        assert load(JobConfig, file, flags).trainer.server_dtypes == expected, flags
    with pytest.raises(UserError, match=r"\['float16'\] lacks inference.dtype = 'bfloat16'"):
        load(JobConfig, file, [*own, "--trainer.server_dtypes", '["float16"]'])


def test_resolved_runs_load_to_themselves(file: Path, tmp_path: Path) -> None:
    job = load(JobConfig, file, ["--orchestrator.steps", "7"])
    (tmp_path / "resolved.toml").write_text(to_toml(job))
    assert load(JobConfig, tmp_path / "resolved.toml", []) == job


TEACHER = 'teacher = { urls = ["http://127.0.0.1:8000"] }\n'


@pytest.mark.parametrize("shared", ["", *(kind for kind in KINDS if kind not in ("distillation", "sft"))])
def test_runs_of_every_kind_of_loss_beside_each_other_load_to_themselves(file: Path, shared: str) -> None:
    """With keys that only the shared kind has, too: what is not set of a run must not come from its neighbours' kind."""
    text = file.read_text().partition("[[runs]]")[0]
    text += f'loss = {{ kind = "{shared}" }}\n' if shared else ""
    for kind in [*(kind for kind in KINDS if kind != "sft"), "package.module:function"]:
        text += f'[[runs]]\nrun_id = "{kind.partition(".")[0]}"\ntraining = {{ loss = {{ kind = "{kind}" }} }}\n'
        text += TEACHER if kind == "distillation" else ""
    file.write_text(text)
    job = load(JobConfig, file, [])
    assert job.every_run[0].training.loss.kind == "importance_ratio"
    resolved = file.with_name("resolved.toml")
    resolved.write_text(to_toml(job))
    again = load(JobConfig, resolved, [])
    assert again == job
    assert to_toml(again) == to_toml(job)
    Reload(file.parent, "run", [str(file)], job, print)  # which parses what is resolved


def test_a_run_has_no_penalty_or_limit_of_the_shared_kind_after_its_file_was_resolved(file: Path) -> None:
    """TOML cannot say "none", so a value of `[orchestrator]` that nobody set would come back in the run."""
    text = file.read_text().partition("[[runs]]")[0] + 'loss = { kind = "dapo" }\n[[runs]]\nrun_id = "a"\n'
    file.write_text(text + 'training = { loss = { kind = "cispo" } }\n')
    resolved = file.with_name("resolved.toml")
    resolved.write_text(to_toml(load(JobConfig, file, [])))
    job = load(JobConfig, resolved, [])
    assert job.orchestrator.advantage.overlong is not None
    assert [(run.advantage.overlong, run.training.loss.ratio_low) for run in job.every_run] == [(None, None)]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("max_tokens = 16 }", "temprature = 1.0 }", ["temprature = 1.0", "is runs[1].sampling.temperature", ":31:14: "]),
        ("steps = 10", "steps = 0", ["runs[1].steps = 0", "greater than or equal to 1"]),
        ("steps = 10", 'model = "other"', ["runs[1].model = 'other'", "once, at the top"]),
        ('run_id = "quick"\n', "", ["runs[1].run_id is required and not set"]),
        ('run_id = "quick"', 'run_id = "plain"', ["run_id = 'plain' is used 2 times"]),
        ('run_id = "quick"', 'run_id = "../up"', ["runs[1].run_id = '../up'", "expected text that matches"]),
        ("lora = { rank = 4 }", "", ["runs[0].training.lora is not set", "trainer.max_runs = 3"]),
        ("steps = 20", "stepps = 20", ["1 error", "orchestrator.stepps = 20", "nearest is orchestrator.steps"]),
        ("steps = 20", "prometheus_port = 9100", ["prometheus_port = 9100 is that of 3 runs"]),
        ("[trainer]", "port = 8002\nreplicas = 3\n[trainer]\nprometheus_port = 8004",
         ["inference.port + 2 = 8004 is the port of trainer.prometheus_port"]),
        ("max_tokens = 32, ", "max_tokens = 300, ", ["runs[0].sampling.max_tokens = 300 leaves no room"]),
        ('[[orchestrator.environments]]\nname = "reverse"\nkind = "reverse-text"', "", ["runs[0].environments is required"]),
        ("[inference]", "[inference]\nlora = { max_rank = 8 }", ["runs[1].training.lora.rank = 16 is above"]),
        ("[[runs]]", "[runs]", ["runs"]),
        ("[inference]", "[inference]\nport = 65535\nreplicas = 2", ["inference.port = 65535", "inference.replicas = 2"]),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_run_is_told_under_its_name(file: Path, old: str, new: str, expected: list[str]) -> None:
    message = complaint(file, old, new)
    for part in [str(file), *expected]:
        assert part in message


def test_a_job_that_stays_needs_no_run_and_is_ready_for_such_as_its_orchestrator_section_describes(file: Path) -> None:
    shared = file.read_text().partition("[[runs]]")[0]
    environments = '[[orchestrator.environments]]\nname = "reverse"\nkind = "reverse-text"\n'
    assert environments in shared
    file.write_text(shared.replace(environments, ""))
    assert "orchestrator.environments is required" in complaint(file, "seed = 3", "seed = 4")
    job = load(JobConfig, file, ["--stay", "true", "--trainer.max_runs", "4"])
    assert job.every_run == []
    assert job.inference.lora is not None
    assert (job.inference.lora.max_rank, job.trainer.max_runs) == (4, 4)
    assert list(sections_of(job)) == ["inference_0", "trainer"]
    assert [worker.name for worker in specification(job, dict.fromkeys(sections_of(job), file)).roles] == list(
        sections_of(job)
    )
    with pytest.raises(UserError, match=r"orchestrator\.training\.lora"):
        load(JobConfig, file, ["--stay", "true", "--orchestrator.training.lora", "null"])
    file.write_text(to_toml(job))
    assert load(JobConfig, file, []) == job


def test_a_job_that_stays_keeps_the_runs_that_it_has(file: Path) -> None:
    assert len(load(JobConfig, file, ["--stay", "true"]).every_run) == 3
