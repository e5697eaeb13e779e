"""What `counterpoint plan` says of jobs that fit and of jobs that do not, and how it counts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from counterpoint.cli.plan import main
from counterpoint.job.plan.advice import largest_tokens
from counterpoint.job.plan.devices import GIB, parse_gpus
from counterpoint.job.plan.dry_run import model_sizes
from counterpoint.job.plan.inference_memory import kv_bytes, weights_of_rank, with_utilization
from counterpoint.job.plan.operations import weights_of
from counterpoint.job.plan.trainer_memory import rank_parts
from counterpoint.run.trained import LoraConfig, TrainingConfig
from counterpoint.run.updates import ReferenceConfig
from counterpoint.trainer.config import TrainerConfig
from counterpoint.transport.errors import UserError
from tests.support.vision_model import make_vision_model

pytestmark = pytest.mark.slow

JOB = """
output_dir = "output"
model = "{model}"

[inference]
max_model_len = 1024
max_num_batched_tokens = 8192

[trainer]
device = "cuda"
compile = false
max_tokens = {tokens}
activation_checkpointing = {checkpointing}

[gpus]
inference = [0]
trainer = [1]

[orchestrator]
[[orchestrator.environments]]
name = "reverse-text"
kind = "reverse-text"
"""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of which only the configuration exists."""
    shape = {
        "vocab_size": 2000,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    dense = Qwen3Config(**shape, intermediate_size=4096, num_hidden_layers=24, tie_word_embeddings=True)
    mixture = Qwen3MoeConfig(
        **shape,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=4,
        num_experts=16,
        num_experts_per_tok=4,
    )
    places = {"dense": tmp_path_factory.mktemp("dense"), "mixture": tmp_path_factory.mktemp("mixture")}
    dense.save_pretrained(places["dense"])
    mixture.save_pretrained(places["mixture"])
    return places


def write_job(directory: Path, model: Path, tokens: int, checkpointing: bool = False) -> str:
    file = directory / "job.toml"
    file.write_text(JOB.format(model=model, tokens=tokens, checkpointing=str(checkpointing).lower()))
    return str(file)


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_parameters_are_counted_exactly(directories: dict[str, Path], kind: str) -> None:
    config = AutoConfig.from_pretrained(directories[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = model_sizes(directories[kind])
    assert sizes.total == sum(parameter.numel() for parameter in model.parameters())
    assert sizes.parameters["embeddings"] == 2000 * 1024 * (1 if kind == "dense" else 2)
    if kind == "mixture":
        assert sizes.parameters["experts"] == 4 * 16 * 3 * 512 * 1024
        assert sizes.parameters["router"] == 4 * 16 * 1024
    else:
        assert sizes.parameters["mlp"] == 24 * 3 * 4096 * 1024
    assert sizes.parameters["attention"] == sizes.layers * 2 * (16 + 4) * 64 * 1024
    assert kv_bytes(sizes, 1, 2) == 2 * sizes.layers * 4 * 64 * 2
    assert kv_bytes(sizes, 8, 2) == 2 * sizes.layers * 64 * 2, "a head is on one GPU at least"
    assert weights_of_rank(sizes, 2) > sizes.total // 2


def test_of_a_vision_language_model_the_part_for_text_alone_computes(tmp_path: Path) -> None:
    model = make_vision_model(tmp_path)
    count = {name: parameter.numel() for name, parameter in model.named_parameters()}
    beside = sum(value for name, value in count.items() if "visual" in name)
    sizes = model_sizes(tmp_path)
    assert sizes.total == sum(count.values())
    assert sizes.parameters["beside text"] == beside
    assert sizes.parameters["mlp"] == sizes.layers * 3 * 64 * 128
    assert weights_of(sizes).always < sizes.total - beside


def test_what_fits_and_what_does_not(
    directories: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_job(tmp_path, directories["dense"], 4096)
    assert main([file, "--gpus", "2xH100-80", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"]
    assert plan["sequences"] > 0
    assert plan["largest_max_tokens"] > 4096
    state = 12 * sum(plan["model"]["parameters"].values())
    assert plan["host"] == {"checkpoint": state}
    assert plan["disk"] == {"checkpoints": 2 * state}
    keys = {"steps": 100, "training.keep_every": 30, "keep_batches": 50, "schedule.rollouts_per_step": 64}
    keeping = [f"--orchestrator.{key}={value}" for key, value in keys.items()]
    assert main([file, "--gpus", "2xH100-80", "--json", *keeping]) == 0
    kept = {"checkpoints": 2 * state, "checkpoints by keep_every": 3 * state, "kept batches": 50 * 64 * 1024 * 13}
    assert json.loads(capsys.readouterr().out)["disk"] == kept
    assert main([file, "--gpus", "2xH100-80", "--json", *keeping, "--orchestrator.keep_batches_gib=0.01"]) == 0
    assert json.loads(capsys.readouterr().out)["disk"] == kept | {"kept batches": GIB // 100}
    largest = plan["largest_max_tokens"]
    assert main([file, "--gpus", "2xH100-80", "--trainer.max_tokens", str(2 * largest)]) == 2
    said = capsys.readouterr().out
    assert "change trainer.max_tokens" in said
    assert f"would fit: trainer.max_tokens = {largest}" in said
    (again,) = re.findall(r"would fit: trainer.activation_checkpointing = (\d+)\n", said)
    longer = [
        file,
        "--gpus",
        "2xH100-80",
        "--trainer.max_tokens",
        str(2 * largest),
        "--trainer.activation_checkpointing",
    ]
    assert 1 < int(again) < model_sizes(directories["dense"]).layers
    assert main([*longer, again]) == 0, "so many layers suffice"
    assert main([*longer, str(int(again) - 1)]) == 2, "and no fewer"
    capsys.readouterr()
    assert main([file, "--gpus", "1xH100-80"]) == 2
    assert "the job uses 2 GPUs; there are 1; change gpus" in capsys.readouterr().out
    assert main([file, "--gpus", "2xSMALL-2", "--json"]) == 2
    plan = json.loads(capsys.readouterr().out)
    assert plan["largest_max_tokens"] == 0
    assert {problem["part"] for problem in plan["problems"]} >= {"activations"}


def test_gpus_are_read_by_name() -> None:
    assert parse_gpus("8xH100-80").count == 8
    assert 79 * GIB < parse_gpus("h100-80").memory < 80 * GIB
    assert parse_gpus("2xMI300-192").memory == 192 * 10**9
    assert parse_gpus("8xH200") == parse_gpus("8xH200-141")
    assert parse_gpus("h100") == parse_gpus("1xH100-80")
    for wrong in ("8", "0xH100-80", "8xH100-80GB", "0xH100", "-1xH100-80"):
        with pytest.raises(UserError, match="expected NxNAME-GB"):
            parse_gpus(wrong)
    with pytest.raises(UserError, match="expected one of A100-40, A100-80"):
        parse_gpus("4xA100")
    with pytest.raises(UserError, match="expected its GB, as in MI300-80"):
        parse_gpus("4xMI300")


def test_the_largest_tokens_are_found_on_a_bent_line() -> None:
    def total(tokens: int) -> int:
        return 1000 + max(tokens, 3 * tokens - 5000)

    assert largest_tokens(total, 21_000) == 25_000 // 3 // 256 * 256
    assert largest_tokens(total, 1100) == 0
    assert largest_tokens(total, 1300) == 256


@pytest.mark.parametrize(
    "content",
    [
        "null",
        "3",
        '{"model_type": "mamba"}',
        '{"model_type": "qwen3", "hidden_size": "wide"}',
        '{"model_type": "qwen3", "num_attention_heads": 0}',
        '{"model_type": "qwen3", "vocab_size": 0}',
        '{"model_type": "qwen3", "dtype": "float7"}',
    ],
)
def test_a_model_that_cannot_be_planned_is_named_with_the_reason(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"model = '.*' cannot be planned: "):
        main([write_job(tmp_path, tmp_path, 1024), "--gpus", "2xH100-80"])


def test_divided_experts_leave_room_on_each_gpu(
    directories: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_job(tmp_path, directories["mixture"], 4096)
    text = (
        Path(file)
        .read_text()
        .replace("trainer = [1]", "trainer = [1, 2]")
        .replace("[trainer]", "[trainer]\nprocesses = 2")
    )
    Path(file).write_text(text)
    sizes = model_sizes(directories["mixture"])
    assert (sizes.expert_layers, sizes.expert_weights) == (4, sizes.parameters["experts"])
    parts: dict[tuple[int, bool], dict[str, int]] = {}
    for parallel, sharding in ((1, False), (2, False), (1, True), (2, True)):
        flags = ["--trainer.expert_parallel", str(parallel), "--trainer.sharding", str(sharding).lower()]
        assert main([file, "--gpus", "3xH100-80", "--json", *flags]) == 0
        parts[parallel, sharding] = json.loads(capsys.readouterr().out)["trainer"]
    whole, alone = parts[1, False], parts[2, False]
    assert whole["weights"] - alone["weights"] == pytest.approx(2 * sizes.expert_weights / 2, rel=1e-5)
    assert whole["moments"] - alone["moments"] == pytest.approx(8 * sizes.expert_weights / 2, rel=1e-5)
    assert alone["exchanged tokens"] > 4 * 4096 * 4 * 1024 * 2
    gathered, both = parts[1, True], parts[2, True]
    assert both["weights"] == gathered["weights"]
    layer = 2 * sizes.expert_weights // sizes.expert_layers
    assert gathered["gathered layers"] - both["gathered layers"] == 2 * layer, "experts are not gathered"
    with pytest.raises(UserError, match="expert_parallel = 3 does not divide"):
        main([file, "--gpus", "3xH100-80", "--trainer.expert_parallel", "3"])
    dense = Path(file).read_text().replace(str(directories["mixture"]), str(directories["dense"]))
    Path(file).write_text(dense)
    with pytest.raises(UserError, match="has no experts"):
        main([file, "--gpus", "3xH100-80", "--trainer.expert_parallel", "2"])


@pytest.mark.slow
def test_a_reference_is_divided_with_a_sharded_model(directories: dict[str, Path], tmp_path: Path) -> None:
    model, runs = directories["dense"], [TrainingConfig(reference=ReferenceConfig())]
    parts = {
        sharding: rank_parts(
            model,
            TrainerConfig(output_dir=tmp_path, model=str(model), processes=2, sharding=sharding),
            runs,
            1024,
            None,
        )
        for sharding in (False, True)
    }
    assert parts[False]["reference"] == parts[False]["weights"]
    assert parts[True]["reference"] == parts[True]["weights"] == (parts[False]["weights"] + 1) // 2


@pytest.mark.slow
def test_each_reference_counts_by_its_own_size(directories: dict[str, Path], tmp_path: Path) -> None:
    small, other = directories["dense"], directories["mixture"]
    trainer = TrainerConfig(output_dir=tmp_path, model=str(small), max_runs=3)

    def reference(*models: Path | None) -> int:
        runs = [
            TrainingConfig(lora=LoraConfig(rank=4), reference=None if model is None else ReferenceConfig(model=model))
            for model in models
        ]
        return rank_parts(small, trainer, runs, 256, None).get("reference", 0)

    sizes = {path: 2 * model_sizes(path).total for path in (small, other)}  # bfloat16
    assert reference(None) == 0
    assert reference(other) == sizes[other] != sizes[small]
    weights = rank_parts(small, trainer, [TrainingConfig(lora=LoraConfig(rank=4))], 256, None)["weights"]
    assert reference(small, other, other) == weights + sizes[other]


@pytest.mark.slow
def test_a_first_adapter_that_is_the_reference_is_held_twice(directories: dict[str, Path], tmp_path: Path) -> None:
    model = directories["dense"]
    trainer = TrainerConfig(output_dir=tmp_path, model=str(model))
    lora = LoraConfig(rank=8, start_from=tmp_path)
    without, of_base, of_start = (
        rank_parts(model, trainer, [TrainingConfig(lora=each, reference=reference)], 256, None)["adapters"]
        for each, reference in ((lora, None), (LoraConfig(rank=8), ReferenceConfig()), (lora, ReferenceConfig()))
    )
    assert of_base == without > 0
    assert of_start == 2 * without


@pytest.mark.slow
def test_runs_have_adapters_of_different_ranks(directories: dict[str, Path], tmp_path: Path) -> None:
    model = directories["dense"]
    trainer = TrainerConfig(output_dir=tmp_path, model=str(model), max_runs=2)
    low, high = TrainingConfig(lora=LoraConfig(rank=4)), TrainingConfig(lora=LoraConfig(rank=16))
    both, other = (rank_parts(model, trainer, runs, 256, None)["adapters"] for runs in ([low, high], [high, low]))
    assert both == other > 0


@pytest.mark.slow
def test_moments_are_those_of_each_runs_optimizer(directories: dict[str, Path], tmp_path: Path) -> None:
    model = directories["dense"]
    trainer = TrainerConfig(output_dir=tmp_path, model=str(model), max_runs=2)
    plain = TrainingConfig(lora=LoraConfig(rank=64), optimizer="sgd", momentum=0.0)
    adamw = TrainingConfig(lora=LoraConfig(rank=8))
    alone, both = (rank_parts(model, trainer, runs, 256, None) for runs in ([adamw], [plain, adamw]))
    assert both["moments"] == alone["moments"] > 0


@pytest.mark.slow
def test_the_largest_part_and_what_would_fit_are_true(
    directories: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(write_job(tmp_path, directories["dense"], 8192))
    file.write_text(file.read_text().replace("inference = [0]\ntrainer = [1]\n", ""))  # both on the first GPU

    def plan(gpus: str, *flags: str) -> dict[str, Any]:
        main([str(file), "--gpus", gpus, "--json", *flags])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    found = plan("1xH100-80")
    (problem,) = found["problems"]
    assert problem["part"] == max(found["trainer"], key=lambda part: found["trainer"][part]) == "activations"
    assert found["largest_max_tokens"] == 0, "not even the least that the job may have"
    assert problem["key"] == "inference.extra_args", "there is no GPU to divide among"
    here = [words for words in found["advice"] if "GPUs of this kind" not in words]
    assert not any("sharding" in words or "of its own" in words for words in here)
    assert (first := found["advice"][0]).startswith("inference.extra_args = ")
    assert plan("1xH100-80", "--inference.extra_args", first.partition(" = ")[2])["fits"], first
    assert "the trainer on a GPU of its own ([gpus])" in plan("2xH100-80")["advice"]
    assert plan("1xH100-80", "--inference.extra_args", '["--gpu-memory-utilization", "0.8"]')["advice"][0].startswith(
        "trainer.max_tokens = "
    )
    long = ["--inference.max_model_len", "8192", "--inference.extra_args", '["--gpu-memory-utilization", "0.8"]']
    assert not any("max_tokens = " in words for words in plan("1xH100-80", *long)["advice"]), "would be refused"


@pytest.mark.slow
def test_an_adapter_is_the_remedy_where_only_that_fits_and_the_fewest_gpus_that_would_do_are_named(
    directories: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(write_job(tmp_path, directories["dense"], 8192, checkpointing=True))
    file.write_text(file.read_text().replace("inference = [0]\ntrainer = [1]\n", ""))

    def plan(gpus: str, *flags: str) -> dict[str, Any]:
        main([str(file), "--gpus", gpus, "--json", *flags])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    found = plan("1xSMALL-6")
    (problem,) = found["problems"]
    assert (problem["part"], problem["key"]) == ("moments", "orchestrator.training.lora")
    adapter, more = found["advice"]
    assert adapter.startswith("[orchestrator.training.lora] and [inference.lora], inference.extra_args = ")
    assert more == "3 GPUs of this kind: trainer.sharding = true and trainer.processes = 2, on GPUs of its own ([gpus])"
    divided = ["--trainer.sharding", "true", "--gpus.inference", "[0]"]
    assert plan("3xSMALL-6", *divided, "--trainer.processes", "2", "--gpus.trainer", "[1, 2]")["fits"]
    assert not plan("2xSMALL-6", "--gpus.inference", "[0]", "--gpus.trainer", "[1]")["fits"], "nor would fewer do"
    assert plan("1xSMALL-3")["advice"] == [
        "10 GPUs of this kind: trainer.sharding = true and trainer.processes = 9, on GPUs of its own ([gpus])"
    ]


def test_another_share_of_a_gpu_keeps_all_else() -> None:
    share = ["--gpu-memory-utilization", "0.5"]
    assert with_utilization([], 0.5) == share
    for given in (["--gpu_memory_utilization=0.9"], ["--gpu-memory-utilization", "0.9"]):
        assert with_utilization(["--a", "1", *given, "--b"], 0.5) == ["--a", "1", "--b", *share]


@pytest.mark.slow
def test_a_server_without_room_has_no_cache(
    directories: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_job(tmp_path, directories["dense"], 4096)
    large = ["--inference.max_num_batched_tokens", "131072"]
    assert main([file, "--gpus", "2xSMALL-4", *large]) == 2
    said = capsys.readouterr().out
    assert "-" not in [line for line in said.splitlines() if "together" in line][1]
    assert "KV cache  " not in said, "nothing is left for it"
    assert "its largest part: activations" in said
    assert "change inference.max_num_batched_tokens" in said
    assert "would fit: inference.max_num_batched_tokens = 2048" in said
    assert main([file, "--gpus", "2xSMALL-4", "--inference.max_num_batched_tokens", "2048", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["sequences"] > 0


@pytest.mark.slow
def test_more_gpus_of_a_server_are_proposed_only_where_they_are_free(
    directories: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(write_job(tmp_path, directories["dense"], 1024, checkpointing=True))
    placed = file.read_text()
    small = ["--inference.max_num_batched_tokens", "2048", "--inference.extra_args"]
    small += ['["--gpu-memory-utilization", "0.73"]']

    def advice(gpus: str, *flags: str) -> list[str]:
        main([str(file), "--gpus", gpus, "--json", *small, *flags])
        plan = json.loads(capsys.readouterr().out)
        assert not plan["sequences"]
        return [words for words in plan["advice"] if words.startswith("inference.tensor_parallel_size")]

    assert advice("8xTINY-3") == [], "[gpus] names one"
    file.write_text(placed.replace("inference = [0]\ntrainer = [1]\n", ""))
    assert advice("2xTINY-3") == [], "one is the trainer's"
    assert advice("3xTINY-3") == ["inference.tensor_parallel_size = 2, on GPUs of its own ([gpus])"]
    file.write_text(placed.replace("inference = [0]", "inference = [0, 2]"))
    main([str(file), "--gpus", "3xTINY-3", "--json", *small, "--inference.tensor_parallel_size", "2"])
    assert json.loads(capsys.readouterr().out)["sequences"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "flags", "said"),
    [
        ("1xH100-80", ["--inference.tensor_parallel_size", "2"], "the job uses 2 GPUs; there are 1"),
        ("1xH100-80", ["--trainer.processes", "4"], "the job uses 4 GPUs; there are 1"),
        (
            "2xH100-80",
            ["--gpus.inference", "[0]", "--gpus.trainer", "[5]"],
            "the job names GPU 5; there are 2, from 0 on",
        ),
        ("1xH100-80", ["--inference.replicas", "4"], "the 4 servers are all on the first GPU, and take "),
    ],
)
def test_a_job_that_needs_other_gpus_than_there_are_does_not_fit(
    directories: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    gpus: str,
    flags: list[str],
    said: str,
) -> None:
    file = Path(write_job(tmp_path, directories["dense"], 1024))
    file.write_text(file.read_text().replace("inference = [0]\ntrainer = [1]\n", ""))
    share = ["--inference.extra_args", '["--gpu-memory-utilization", "0.5"]']
    assert main([str(file), "--gpus", gpus, *share, *flags]) == 2
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--inference.tensor_parallel_size", "3"], r"inference: tensor_parallel_size = 3: .* 16 attention heads"),
        (["--inference.max_model_len", "40000"], r"inference: max_model_len = 40000: .* at most 32768 tokens"),
    ],
)
def test_what_servers_refuse_whatever_the_memory_is_refused(
    directories: dict[str, Path], tmp_path: Path, flags: list[str], said: str
) -> None:
    file = Path(write_job(tmp_path, directories["dense"], 40_000))
    file.write_text(file.read_text().replace("inference = [0]\ntrainer = [1]\n", ""))
    with pytest.raises(UserError, match=said):
        main([str(file), "--gpus", "8xH100-80", *flags])
    elsewhere = ["--inference.replicas", "0", "--orchestrator.inference.urls", '["http://127.0.0.1:8000"]']
    main([str(file), "--gpus", "8xH100-80", *flags, *elsewhere])


SFT = """
output_dir = "output"
model = "{model}"
[data]
path = "rows.jsonl"
[trainer]
device = "cuda"
compile = false
max_tokens = 4096
"""


def test_a_fine_tuning_is_planned_as_a_jobs_trainer(
    directories: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, job = tmp_path / "sft.toml", write_job(tmp_path, directories["dense"], 4096)
    file.write_text(SFT.format(model=directories["dense"]))
    plans = []
    for each in (str(file), job):
        assert main([each, "--gpus", "2xH100-80", "--json"]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    sft, of_job = plans
    assert sft["trainer"] == of_job["trainer"]
    assert sft["server"] is None
    assert main([str(file), "--gpus", "1xTINY-12"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "does not fit: a rank of the trainer needs" in said
    assert "would fit: trainer.max_tokens = " in said
    assert main([str(file), "--gpus", "1xTINY-12", "--max_length", "4096"]) == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "would fit: [training.lora]" in said
    assert "trainer.max_tokens = 4096; " in said
    assert "would fit: trainer.max_tokens" not in said
    assert "inference" not in said
    (tmp_path / "server.toml").write_text('model = "x"\nport = 8000\n')
    with pytest.raises(UserError, match="this is a server file"):
        main([str(tmp_path / "server.toml"), "--gpus", "1xH100-80"])


def test_an_adapter_needs_a_section_of_the_servers_too_wherever_they_run(
    directories: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(write_job(tmp_path, directories["dense"], 1024))
    file.write_text(file.read_text().replace("inference = [0]\ntrainer = [1]\n", ""))
    elsewhere = ["--inference.replicas", "0", "--orchestrator.inference.urls", '["http://127.0.0.1:8000"]']
    assert main([str(file), "--gpus", "2xTINY-5", "--json", *elsewhere]) == 2
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert any("[orchestrator.training.lora] and [inference.lora]" in words for words in advice), advice


@pytest.mark.filterwarnings("ignore")  # of torch in its compiler
def test_a_trainer_that_compiles_is_planned_so(directories: dict[str, Path], tmp_path: Path) -> None:
    torch._dynamo.reset()  # which leaves layers as they are that could not be compiled in an earlier test
    runs = [TrainingConfig(lora=LoraConfig(rank=8))]
    compiled, eager = (
        rank_parts(
            directories["dense"],
            TrainerConfig(output_dir=tmp_path, model="", compile=given),
            runs,
            8192,
            80 * GIB,
        )
        for given in (None, False)
    )
    assert compiled["weights"] == eager["weights"]
    assert 0.6 * eager["activations"] < compiled["activations"] < 0.95 * eager["activations"]


@pytest.mark.filterwarnings("ignore")  # of torch in its compiler
def test_layers_that_cannot_be_compiled_are_planned_so(
    directories: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from counterpoint.job.plan import compiled_graphs

    def full_disk(*_: Any) -> None:
        raise OSError("No space left on device")

    shutil.copytree(directories["dense"], tmp_path / "model")  # of which nothing is planned yet
    monkeypatch.setattr(compiled_graphs, "backend", full_disk)
    runs = [TrainingConfig(lora=LoraConfig(rank=8))]
    with torch._dynamo.config.patch(suppress_errors=True):  # as a trainer in this process leaves it
        compiled, eager = (
            rank_parts(
                tmp_path / "model", TrainerConfig(output_dir=tmp_path, model="", compile=given), runs, 1024, 80 * GIB
            )
            for given in (None, False)
        )
    torch._dynamo.reset()
    assert compiled == eager
    assert "No space left on device" in caplog.text
