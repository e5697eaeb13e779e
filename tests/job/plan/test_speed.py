"""The predicted speed: its parts, who idles, the best division of the cards, and the correction by a measured run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from counterpoint.cli.plan import main
from counterpoint.inference.config import InferenceConfig
from counterpoint.job.plan.card_rates import RATES
from counterpoint.job.plan.dry_run import model_sizes
from counterpoint.job.plan.measured import rollouts_of
from counterpoint.job.plan.speed import (
    Corrections,
    Rollouts,
    Work,
    best_split,
    decode_seconds,
    predict,
    rollout_seconds,
    server_seconds,
    splits,
    trainer_seconds,
)
from counterpoint.run.config import ScheduleConfig
from counterpoint.run.trained import TrainingConfig
from counterpoint.transport.errors import UserError

pytestmark = pytest.mark.slow

H100 = RATES["H100-80"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    shape = {
        "vocab_size": 2000,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    Qwen3Config(**shape, intermediate_size=4096, num_hidden_layers=24, tie_word_embeddings=False).save_pretrained(place)
    return place


@pytest.fixture
def work(directory: Path) -> Work:
    return Work(
        sizes=model_sizes(directory),
        training=TrainingConfig(),
        schedule=ScheduleConfig(rollouts_per_step=64, max_inflight_rollouts=128),
        servers=InferenceConfig(model="m", dtype="bfloat16", max_num_seqs=128),
        rollouts=Rollouts(100, 400, 500),
        dtype="bfloat16",
        checkpointing=False,
        keeps_attention=True,
        sequences=1000,
    )


def test_a_small_batch_is_read_and_a_large_one_computed(work: Work) -> None:
    """With few sequences a token takes the time to read the weights, with very many that to multiply."""
    weights = work.sizes.total - work.sizes.vocabulary * work.sizes.hidden - work.sizes.parameters["norms"]
    short = replace(work, rollouts=Rollouts(0, 2, 2))
    assert decode_seconds(short, H100, 1) == pytest.approx(2 * weights / H100.bandwidth, rel=0.01)
    assert decode_seconds(short, H100, 4000) / 4000 == pytest.approx(2 * weights / H100.half, rel=0.01)


def test_twice_the_ranks_and_servers_take_half_the_time(work: Work) -> None:
    more = replace(work, ranks=2, replicas=2)
    crowded = replace(
        more, schedule=work.schedule.model_copy(update={"max_inflight_rollouts": 256, "max_lead_steps": 4})
    )
    assert server_seconds(crowded, H100) == pytest.approx(server_seconds(work, H100) / 2)
    update = trainer_seconds(replace(work, schedule=work.schedule.model_copy(update={"rollouts_per_step": 0})), H100)
    assert trainer_seconds(more, H100) - update == pytest.approx((trainer_seconds(work, H100) - update) / 2)


def test_the_slower_side_sets_the_pace_unless_they_take_turns(work: Work) -> None:
    speed = predict(work, H100, Corrections(servers=3.0, pause=0.01))
    assert speed.wall == max(speed.trainer, speed.servers)
    assert min(speed.trainer_idle, speed.servers_idle) == 0.0
    assert max(speed.trainer_idle, speed.servers_idle) > 0.0
    on_policy = work.schedule.model_copy(update={"max_lead_steps": 1})
    turns = predict(replace(work, schedule=on_policy), H100, Corrections())
    assert turns.wall == turns.trainer + turns.servers
    assert turns.staleness == 1.0


@pytest.mark.parametrize("cards", [2, 5, 8, 32])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_best_division_is_the_best_of_all(work: Work, cards: int, tensor: int) -> None:
    """Counted independently: the seconds of each side for so many cards and of the way through both, the least of the largest."""
    work = replace(work, servers=work.servers.model_copy(update={"tensor_parallel_size": tensor}))
    found = best_split(work, cards, lambda ranks: ranks != 3, H100, Corrections())
    walls = []
    for ranks in range(1, cards + 1):
        for replicas in range(1, cards + 1):
            if ranks != 3 and ranks + replicas * tensor <= cards:
                each = replace(work, ranks=ranks, replicas=replicas)
                trainer, alone = trainer_seconds(each, H100), rollout_seconds(each, H100, 1)
                walls.append(max(trainer, server_seconds(each, H100), (alone + trainer) / 2))
    if found is None:
        assert not walls
    else:
        assert found.wall == pytest.approx(min(walls))
        assert found.ranks + found.replicas * tensor <= cards


def test_a_division_that_does_not_fit_is_none(work: Work) -> None:
    assert list(splits(work, 4, lambda ranks: False)) == []
    assert best_split(work, 1, lambda ranks: True, H100, Corrections()) is None


def write_measured(directory: Path, model: Path, *, steps: int = 20) -> Path:
    """A job that has measured steps of a second, of which the trainer works 0.59.

    As in a real one, roles have its directory and model as absolute paths, and the top has them as they were given.
    """
    job: dict[str, Any] = {
        "output_dir": "outputs/demo",
        "model": "a/name",
        "inference": {"model": str(model), "max_model_len": 1024},
        "trainer": {"output_dir": str(directory), "model": str(model), "device": "cpu", "dtype": "float32"},
        "orchestrator": {"run_id": "run", "environments": [{"name": "reverse-text", "kind": "reverse-text"}]},
    }
    (directory / "run_run").mkdir(parents=True)
    (directory / "trainer").mkdir()
    (directory / "job.json").write_text(json.dumps(job))
    shipped, trained = [], []
    for step in range(1, steps + 1):
        shipped.append({
            "step": step, "time": float(step), "rollouts/completed": 64, "rollouts/failed": 0, "rollouts/cancelled": 0,
            "tokens/prompt": 6400, "tokens/completion": 3200, "batch/tokens": 9600, "staleness/mean": 1.9,
            "phase/generation": 0.9, "phase/wait_inference": 0.1, "phase/wait_trainer": 0.0,
            "wall_seconds": 0.9 + 0.1, "staleness/lossless": 5, "staleness/lossless_lead": 1,
            "staleness/lost_share": 0.1, "staleness/lost_mean": 5.0,
        })  # fmt: skip
        trained.append({
            "run_id": "run", "step": step, "time": float(step), "phase/train": 0.5, "phase/broadcast": 0.09, "phase/wait": 0.41
        })  # fmt: skip
    for path, lines in ((directory / "run_run", shipped), (directory / "trainer", trained)):
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_a_directory_says_who_waits_and_what_is_lost(
    tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = write_measured(tmp_path / "job", directory)
    assert main([str(job)]) == 0
    said = capsys.readouterr().out
    assert "the trainer waits 41%: 1 more server" in said
    assert "max_off_policy_steps = 5" in said
    assert main([str(job), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [found[name] for name in ("wall", "pause", "staleness")] == pytest.approx([1.0, 0.1, 1.9])
    assert (found["trainer"], found["publishing"]) == (pytest.approx(0.5), pytest.approx(0.09))
    assert found["rollouts"] == {"prompt": 100, "completion": 50, "trained": 150, "played": 1, "cached": 0}
    assert found["staleness/lossless"] == 5


def write_job(path: Path, model: Path, device: str = "cpu") -> str:
    path.write_text(
        f'output_dir = "output"\nmodel = "{model}"\n[inference]\nmax_model_len = 1024\n[trainer]\ndevice = "{device}"\n'
        'dtype = "float32"\nmax_tokens = 1024\n[orchestrator]\nsteps = 3600\n[[orchestrator.environments]]\n'
        'name = "reverse-text"\nkind = "reverse-text"\n'
    )
    return str(path)


def predicted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_measured_job_is_predicted_as_it_is_and_another_in_proportion(
    tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the rates of this processor are: they cancel out."""
    job, file = write_measured(tmp_path / "job", directory), write_job(tmp_path / "job.toml", directory)
    same = predicted(capsys, file, "--gpus", "cpu", "--speed", str(job), "--price", "2")
    assert same["own"]["wall"] == pytest.approx(1.0)
    assert same["own"]["trainer"] == pytest.approx(0.59)
    assert (same["hours"], same["price"]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert same["best"] is None


def test_what_a_processor_measured_corrects_no_gpu(
    tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, file = write_measured(tmp_path / "job", directory), write_job(tmp_path / "job.toml", directory, "cuda")
    on_gpus = predicted(capsys, file, "--gpus", "8xH100", "--speed", str(job))
    assert on_gpus["corrections"] is None
    assert on_gpus == predicted(capsys, file, "--gpus", "8xH100", "--speed", str(job))
    assert on_gpus["best"]["wall"] <= on_gpus["own"]["wall"]
    assert main([file, "--gpus", "8xH100", "--speed", "100+50"]) == 0
    assert "nothing is measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wall_seconds", 0),
        ("wall_seconds", "x"),
        ("batch/tokens", -1),
        ("tokens/prompt", -1),
        ("phase/wait_inference", 9e17),
    ],
)
def test_what_no_step_can_have_measured_is_refused(tmp_path: Path, directory: Path, name: str, value: object) -> None:
    job = write_measured(tmp_path / "job", directory)
    path = job / "run_run" / "metrics.jsonl"
    lines = [json.loads(line) | {name: value} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match="cannot be"):
        main([str(job)])


def test_more_cards_than_there_are_and_prices_that_are_none_are_refused(tmp_path: Path, directory: Path) -> None:
    file = write_job(tmp_path / "job.toml", directory, "cuda")
    with pytest.raises(UserError, match="2xH100-80"):
        main([file, "--gpus", "1xH100", "--speed", "100+50"])
    for price in ("nan", "-1", "inf"):
        with pytest.raises(UserError, match="--price"):
            main([file, "--gpus", "8xH100", "--speed", "100+50", "--price", price])


def test_a_prompt_has_logits_of_its_last_token_alone(work: Work) -> None:
    schedule = work.schedule.model_copy(update={"rollouts_per_step": 1})
    short, long = (
        server_seconds(replace(work, schedule=schedule, rollouts=Rollouts(prompt, 1, 2)), H100) for prompt in (0, 1)
    )
    in_layers = sum(work.sizes.parameters[kind] for kind in ("attention", "mlp"))
    assert (long - short) * H100.half == pytest.approx(2 * in_layers, rel=1e-3)


def test_a_card_of_a_server_has_whole_heads(work: Work) -> None:
    """A model of 4 heads of keys on 8 cards: each reads one head, as on 4."""
    many = replace(work, rollouts=Rollouts(0, 10**8, 10**8))
    on_four, on_eight = (
        decode_seconds(replace(many, servers=work.servers.model_copy(update={"tensor_parallel_size": cards})), H100, 1)
        for cards in (4, 8)
    )
    assert on_eight == pytest.approx(on_four, rel=1e-3)


def test_tokens_that_are_none_are_refused() -> None:
    assert rollouts_of("200+800") == Rollouts(200, 800, 1000)
    for text in ("200", "200+", "a+b", "200+0", "nowhere"):
        with pytest.raises(UserError, match="PROMPT"):
            rollouts_of(text)


def test_cards_of_unknown_rates_and_jobs_without_steps_are_refused(tmp_path: Path, directory: Path) -> None:
    file = write_job(tmp_path / "job.toml", directory)
    with pytest.raises(UserError, match="rates are not known"):
        main([file, "--gpus", "2xRTX-24", "--speed", "100+50"])
    with pytest.raises(UserError, match="at least"):
        main([str(write_measured(tmp_path / "short", directory, steps=6))])
    with pytest.raises(UserError, match="--gpus"):
        main([file])
