"""Recipes of the Tinker cookbook, unmodified, play on `counterpoint tinker FILE`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from counterpoint.job.resolve_model import resolve_model
from tests.support.polling import DEADLINE_SECONDS
from tests.support.ports import free_port
from tests.support.running_job import RunningJob, assert_nothing_is_left

COOKBOOK = Path(__file__).parents[2] / "build" / "cookbook"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(not COOKBOOK.exists(), reason="the cookbook is not installed: make build/cookbook"),
]

NAMES = ["Qwen/Qwen3-8B", "Qwen/Qwen3.5-9B"]
"""Names from the cookbook's registry for the job's model: recipes ask the registry for renderers."""

RL = "group_size=4 lora_rank=4 learning_rate=1e-3 max_steps=2"

RECIPES = {
    "math_rl.train": f"{RL} groups_per_batch=4 save_every=1 eval_every=0 loss_fn=importance_sampling",
    "multiplayer_rl.twenty_questions.train": "batch_size=1 group_size=2 max_tokens=8 max_steps=1 eval_every=0",
    "preference.shorter.train": "batch_size=2 group_size=2 max_tokens=8 max_steps=2 eval_every=0",
    "prompt_distillation.train": "file_path={conversations} batch_size=4 max_steps=2 eval_every=0 lora_rank=4",
}
"""Settings of each recipe beside those of all."""


def test_recipes_of_the_cookbook_play_unmodified(tmp_path: Path) -> None:
    model, port = resolve_model("tiny-dense"), free_port()
    for name in NAMES:
        write_tokenizer(model, tmp_path / name)
    file = tmp_path / "job.toml"
    job = {
        "output_dir": str(tmp_path / "output"),
        "model": "tiny-dense",
        "inference": {"port": free_port(), "dtype": "float32", "max_model_len": 2048, "max_num_batched_tokens": 8192},
        "trainer": {"device": "cpu", "max_tokens": 2048, "max_runs": 3},  # the last recipe takes the first one's slot
        "tinker": {"port": port, "models": NAMES},
    }
    file.write_text(tomli_w.dumps(job))
    running = RunningJob(file, tmp_path / "output", command="tinker")
    try:
        log = tmp_path / "output" / "service.log"
        running.wait_for(
            "the service", lambda: log.exists() and re.search("answers at http", log.read_text()) is not None
        )
        played = subprocess.run(
            [sys.executable, "-m", "tests.service.cookbook_recipes"],
            input=json.dumps([[f"tinker_cookbook.recipes.{name}", settings_of(name, tmp_path)] for name in RECIPES]),
            env=os.environ | {
                "PYTHONPATH": f"{COOKBOOK}:{Path(__file__).parents[2]}",
                "TINKER_API_KEY": "tml-any-key",
                "TINKER_BASE_URL": f"http://127.0.0.1:{port}",
                "HF_HUB_OFFLINE": "1",
            },
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=3 * DEADLINE_SECONDS,
            check=False,
        )  # fmt: skip
        assert played.returncode == 0, (played.stdout, played.stderr[-8000:], running.output()[-4000:])
        running.process.terminate()
        running.wait()
        assert_nothing_is_left(running)
    finally:
        running.end()
    assert re.findall(r"played tinker_cookbook\.recipes\.(\S+)", played.stdout) == list(RECIPES)
    metrics = [json.loads(line) for line in (tmp_path / "math_rl.train" / "metrics.jsonl").read_text().splitlines()]
    kls = [line["optim/kl_sample_train_v2"] for line in metrics if "optim/kl_sample_train_v2" in line]
    assert len(kls) == 2
    assert max(kls) < 1e-4, "samplers and trainer have other log-probabilities"


def write_tokenizer(model: Path, directory: Path) -> None:
    """The cookbook takes tokenizers by name: here from a directory of that name. Renderers of Qwen look for their own
    tokens."""
    directory.mkdir(parents=True)
    shutil.copy(model / "config.json", directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_text(
            (model / name).read_text().replace("<|end|>", "<|im_end|>").replace("<|system|>", "</think>")
        )


def settings_of(name: str, directory: Path) -> list[str]:
    conversations = COOKBOOK / "tinker_cookbook" / "example_data" / "conversations.jsonl"
    shared = f"model_name={NAMES[0]} renderer_name=role_colon log_path={directory / name}"
    return f"{shared} {RECIPES[name]}".format(conversations=conversations).split()
