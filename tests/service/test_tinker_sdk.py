"""The unmodified SDK trains, samples, saves and resumes with `counterpoint tinker FILE`, whatever is killed meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from counterpoint.models.build import make_model
from counterpoint.service.records.database import open_to_read
from counterpoint.service.records.ledger import used_by_day
from tests.service.sdk_client import TEXT
from tests.support.polling import DEADLINE_SECONDS
from tests.support.ports import free_port
from tests.support.running_job import RunningJob, assert_nothing_is_left

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


def write_adapter(directory: Path) -> Path:
    """An adapter that PEFT has made."""
    base = AutoModelForCausalLM.from_pretrained(make_model("tiny-dense"))
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(directory)
    return directory


def expected_of(adapter: Path) -> list[float]:
    """What PEFT's model of an adapter has for the log-probabilities of the client's text."""
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(make_model("tiny-dense")), adapter)
    tokens = torch.tensor(TEXT)
    with torch.no_grad():
        rows = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    found: list[float] = rows.gather(1, tokens[1:, None])[:, 0].tolist()
    return found


def write_job(directory: Path) -> Path:
    file = directory / "job.toml"
    job = {
        "output_dir": str(directory / "output"),
        "model": "tiny-dense",
        "inference": {"port": free_port(), "dtype": "float32", "max_model_len": 64, "max_num_batched_tokens": 256},
        "trainer": {"device": "cpu", "max_tokens": 64, "max_runs": 20},
        "tinker": {
            "port": free_port(),
            "max_rank": 8,
            "adapters": {"brought": str(write_adapter(directory / "adapter"))},
        },
    }
    file.write_text(tomli_w.dumps(job))
    return file


VERSIONS = ("0.25.0", "0.27.2", "0.29.1", "0.33.1", "0.38.0")
"""The versions of the SDK that are played. All but the newest are beside each other in `build/tinker`."""


def play(version: str, url: str) -> dict[str, Any]:
    """What a program of a user of one version saw."""
    place = ROOT / "build" / "tinker" / version
    if version != VERSIONS[-1] and not place.is_dir():
        subprocess.run(["make", "-s", str(place.relative_to(ROOT))], cwd=ROOT, check=True)
    played = subprocess.run(
        [sys.executable, "-m", "tests.service.each_sdk", url, "tiny-dense"],
        env=os.environ | ({"PYTHONPATH": str(place)} if version != VERSIONS[-1] else {}),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert played.returncode == 0, (version, played.stderr[-5000:])
    found: dict[str, Any] = json.loads(played.stdout.splitlines()[-1])
    return found


def download(url: str, path: str, directory: Path) -> Path:
    """Fetches weights by the SDK's own command; returns their directory."""
    place = directory / path.removeprefix("tinker://").replace("/", "_").replace(":", "_")
    command = ["tinker", "--format", "json", "checkpoint", "download", path, "--output", str(place)]
    variables = os.environ | {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-the-key-of-a-test-0123456789"}
    done = subprocess.run(
        [Path(sys.executable).parent / command[0], *command[1:]],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = place.iterdir()
    return found


def play_the_page(url: str) -> tuple[list[float], list[int]]:
    """The losses and the sampled tokens that the program at the head of docs/tinker.md prints."""
    [block] = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "tinker.md").read_text(), re.DOTALL | re.MULTILINE)
    assert "http://127.0.0.1:8200" in block
    command = [sys.executable, "-W", "ignore", "-c", block.replace("http://127.0.0.1:8200", url)]
    played = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert played.returncode == 0, played.stderr[-5000:]
    *losses, tokens = map(json.loads, played.stdout.splitlines())
    return losses, tokens


def check_played(version: str, seen: dict[str, Any], losses: list[float]) -> None:
    """Checks what it saw; every version has the losses of the others."""
    assert seen["version"] == version
    assert seen["losses"] == losses
    assert [len(tokens) == len(logprobs) for tokens, logprobs in seen["sampled"]] == [True, True]
    assert seen["resumed"][0] == seen["resumed"][1]
    assert seen["late"].startswith("400 ")
    assert seen["deleted"].startswith("404 ")
    assert seen["metadata"] == {"made_by": "a test"}
    assert sorted(seen["listed"]) == ["sampler_weights/sampler", "weights/state"]
    assert seen.get("in flight", 2) == 2
    assert seen.get("whole", [6, "length", [2] * 6]) == [6, "length", [2] * 6]


def check_ledger(path: Path) -> None:
    """Checks that the requests of each model count, all of them and by their numbers, also where processes were killed."""
    records = open_to_read(path)
    [used] = [each for accounts in used_by_day(records.execute).values() for each in accounts.values()]
    assert min(used.trained, used.forward, used.prompt, used.sampled, used.seconds) > 0
    counted = {source: json.loads(stretches) for source, stretches in records.execute("SELECT * FROM counted")}
    of_models = [stretches for source, stretches in counted.items() if ":train:" in source]
    assert of_models
    assert all(len(stretches) == 1 and stretches[0][0] == 1 for stretches in of_models)


def check_told(
    base: dict[str, Any], again: dict[str, Any], snapshot: dict[str, Any], once_more: dict[str, Any]
) -> None:
    """Checks what two samplers say of the places of a text, each twice and by the same seed."""
    for one, other in ((base, again), (snapshot, once_more)):
        assert one["samples"] == other["samples"]
        tokens, repeated = ([[token for token, _ in row] for row in each["drawn"]] for each in (one, other))
        assert tokens == repeated
        assert one["given"] == pytest.approx(one["own"], abs=1e-2)
        for top, drawn, text, own in zip(one["top"], one["drawn"], TEXT[1:], one["own"], strict=True):
            known, values = dict(top), [value for _, value in top]
            assert (len(known), values) == (5, sorted(values, reverse=True))
            for token, value in [*drawn, (text, own)]:
                assert value == pytest.approx(known[token], abs=1e-2) if token in known else value < values[-1] + 1e-2
    # The base model is too sure after this text to write another sample by another seed.
    assert snapshot["samples"][0] != snapshot["samples"][1]
    assert base["top"] != snapshot["top"]


@pytest.mark.promise("the unmodified Tinker SDK trains")
def test_the_unmodified_sdk_trains_samples_saves_and_resumes(tmp_path: Path) -> None:
    output = tmp_path / "output"
    job = RunningJob(write_job(tmp_path), output, command="tinker")
    client = None
    try:
        address = re.compile(r"answers at (http://\S+)")
        log = output / "service.log"
        job.wait_for("the service", lambda: log.exists() and address.search(log.read_text()) is not None)
        found = address.search(log.read_text())
        assert found is not None
        client = subprocess.Popen(
            [sys.executable, "-m", "tests.service.sdk_client", found[1], "tiny-dense", "brought"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdin is not None
        assert client.stdout is not None
        assert client.stdout.readline() == "pause\n", job.output()
        for role in ("service", "trainer"):
            os.kill(job.pid_of(f"cli.main {role}"), signal.SIGKILL)
        seen, _ = client.communicate("go on\n", timeout=DEADLINE_SECONDS)
        assert client.returncode == 0, (job.output(), log.read_text())
        results = json.loads(seen.splitlines()[-1])
        downloads = [
            download(found[1], path, tmp_path)
            for path in (results["external"], results["paths"][0], results["brought"][1])
        ]
        played = {version: play(version, found[1]) for version in VERSIONS}
        losses, tokens = play_the_page(found[1])
        job.wait_for("the deleted states", lambda: len(list(output.glob("trainer/*/saved/step_*"))) == 1)
        records, in_flight = (
            output / "service" / "records.db",
            "SELECT 1 FROM saved WHERE kind = 'inflight' AND NOT deleted",
        )
        job.wait_for("weights in flight", lambda: not open_to_read(records).execute(in_flight).fetchall())
        job.process.send_signal(signal.SIGTERM)
        job.wait()
        assert_nothing_is_left(job)
    finally:
        if client is not None:
            client.kill()
            client.wait()
        job.end()
    check_ledger(records)
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert 0 < len(tokens) <= 8
    status = json.loads((output / "service" / "status.json").read_text())
    assert status["keys"][""]["name"] == "local"
    assert status["ledger"][0]["used"]["trained"] > 0
    assert results["rank"] == 4
    assert results["disturbed"] == results["undisturbed"], "the kill changed something"
    assert results["disturbed"][-1] < results["disturbed"][0] / 2, "nothing was learned"
    one, same = results["seeded"]
    assert one == same != results["undisturbed"]
    for sampled, trained in zip(results["sampled"], results["trained"], strict=True):
        assert trained == pytest.approx(sampled, abs=1e-2), "the sampler has other weights than the trainer"
    assert results["prompt_logprobs"][0] is None
    assert all(value < 0 for value in results["prompt_logprobs"][1:])
    ours, trainers = results["adapters_prompt"]
    assert ours == trainers != results["prompt_logprobs"][1:]
    assert "the sampler has the weights of update" in results["old_prompt"]
    check_told(*results["told"])
    assert results["named"] == 1
    assert [path.rpartition("/")[0].rpartition("/")[2] for path in results["paths"]] == ["weights", "sampler_weights"]
    base_chats, adapters_chats = results["chats"]
    for model, chats in zip(("tiny-dense", results["paths"][1]), (base_chats, adapters_chats), strict=True):
        assert [name for name, _ in chats] == [model] * 2
        assert chats[0][1] == chats[1][1] != ""
    assert base_chats[0][1] != adapters_chats[0][1]
    out, of_state, same = (load_file(each / "adapter_model.safetensors") for each in downloads)
    assert results["brought"][0] == pytest.approx(expected_of(tmp_path / "adapter"), abs=1e-4)
    given = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert same.keys() == given.keys()
    assert all(torch.equal(tensor, given[name]) for name, tensor in same.items())
    assert json.loads((downloads[2] / "adapter_config.json").read_text())["lora_alpha"] == 8
    assert out.keys() == of_state.keys()
    assert all(torch.equal(tensor, of_state[name]) for name, tensor in out.items())
    base = AutoModelForCausalLM.from_pretrained(make_model("tiny-dense"))
    adapted = PeftModel.from_pretrained(base, downloads[0])
    assert {key.replace(".default.", ".") for key in adapted.state_dict() if "lora_" in key} == out.keys()
    first, resumed, fresh = results["resumed"]
    assert first == resumed
    assert first != fresh
    assert "stable_reinforce" in results["refused"]
    assert results["loss"].endswith(":loss:0")
    by_trainer, by_client = results["custom"]
    assert by_trainer == pytest.approx(by_client, abs=1e-5)
    for version, each in played.items():
        check_played(version, each, results["undisturbed"])
