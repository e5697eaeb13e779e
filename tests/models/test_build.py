"""The built-in models: they load as any model does, play the demo's tasks as well as promised, and are built once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import counterpoint.models.build
import counterpoint.models.warm_up
from counterpoint.environments.base import Environment, OnePolicy, Reply
from counterpoint.environments.chat import Chat, Tool
from counterpoint.environments.sampling import SamplingConfig, SamplingOverrides
from counterpoint.environments.tasks.guess_number import GuessNumber
from counterpoint.environments.tasks.reverse_text import ReverseText
from counterpoint.inference.config import InferenceConfig
from counterpoint.inference.server import check_sizes, read_model
from counterpoint.models.build import check_model, make_model, resolve_model
from counterpoint.models.demonstrations import Demonstrator
from counterpoint.models.tiny_models import ARCHITECTURES, write_untrained
from counterpoint.transport.files.atomic import STABLE
from counterpoint.transport.records import Rollout, Turn

USER = [{"role": "user", "content": "reverse abc"}]


@pytest.fixture(params=["tiny_moe", "tiny_dense"])
def built(request: pytest.FixtureRequest) -> Path:
    """Each built-in model in turn."""
    directory: Path = request.getfixturevalue(request.param)
    return directory


@pytest.fixture
def short_warm_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and a warm-up of two steps: enough to see how building works."""
    monkeypatch.setattr(counterpoint.models.warm_up, "SKILL_STEPS", 1)
    monkeypatch.setattr(counterpoint.models.warm_up, "MIXTURE_STEPS", 1)
    monkeypatch.setenv("COUNTERPOINT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
def test_transformers_loads_it(built: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(built)
    tokenizer = AutoTokenizer.from_pretrained(built)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == model.get_output_embeddings().weight.shape[0]
    assert tuple(model.generation_config.eos_token_id) == Chat(built).stop_token_ids
    rendered = tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=False)
    assert rendered == Chat(built).start(USER)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_server_takes_it_with_its_default_settings(name: str, tmp_path: Path) -> None:
    write_untrained(name, tmp_path, 0).config.save_pretrained(tmp_path)
    config = InferenceConfig(model=str(tmp_path))
    check_sizes(config, read_model(config))


@pytest.mark.slow
def test_the_mixture_of_experts_has_the_size_promised_and_uses_all_its_experts(tiny_moe: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_moe)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert 1e6 <= parameters <= 3e6
    assert model.config.num_experts >= 8
    assert model.config.num_experts_per_tok == 2
    demonstrator = Demonstrator(Chat(tiny_moe), seed=5)
    counts = torch.zeros(model.config.num_hidden_layers, model.config.num_experts, dtype=torch.long)
    for each in demonstrator.reverse_text(64, 0.4) + demonstrator.guess_number(64, 0.4):
        with torch.no_grad():
            router_logits = model(input_ids=torch.tensor([each.token_ids]), output_router_logits=True).router_logits
        for layer, logits in enumerate(router_logits):
            counts[layer] += torch.bincount(logits.topk(2).indices.flatten(), minlength=model.config.num_experts)
    assert counts.min() > 0


class _SampledModel(OnePolicy):
    """The policy, by plain sampling at temperature 1 (`environments.base.Model`)."""

    def __init__(self, model: Any, chat: Chat, generator: torch.Generator) -> None:
        self.chat = chat
        self._model = model
        self._generator = generator
        self.sampling = SamplingConfig()

    @torch.no_grad()
    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        written: list[int] = []
        while len(written) < 12 and not (written and written[-1] in self.chat.stop_token_ids):
            logits = self._model(input_ids=torch.tensor([[*prompt_ids, *written]]), use_cache=False).logits[0, -1]
            written.append(int(torch.multinomial(logits.softmax(-1), 1, generator=self._generator)))
        return Turn(
            np.array(prompt_ids, np.int32), np.array(written, np.int32), np.zeros(len(written), np.float32), 0, "stop"
        )

    async def parse(self, turn: Turn, tools: Sequence[Tool] = (), *, reasoning: bool = False) -> Reply:
        return Reply(self.chat.decode(turn.completion_ids.tolist()))


@pytest.mark.slow
@pytest.mark.parametrize("environment", [ReverseText(), GuessNumber()], ids=["reverse-text", "guess-number"])
async def test_rewards_start_where_reinforcement_learning_can_raise_them(built: Path, environment: Environment) -> None:
    chat, generator = Chat(built), torch.Generator().manual_seed(0)
    model = _SampledModel(AutoModelForCausalLM.from_pretrained(built), chat, generator)
    rewards = []
    for index in range(96):
        example = environment.example(index % len(environment))
        state: dict[str, Any] = {}
        await environment.rollout(example, model, state)
        score = await environment.score(example, Rollout("0-0", 0, "task", example.index, state=state))
        assert isinstance(score, float)
        rewards.append(score)
    assert 0.25 < np.mean(rewards) < 0.65
    assert np.mean(np.equal(rewards, 1.0)) > 0.15  # able
    assert np.mean(np.less(rewards, 0.5)) > 0.15  # but only sometimes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-moe", "tiny-dense"])
def test_the_same_name_and_seed_give_the_same_bytes(short_warm_up: Path, tmp_path: Path, name: str) -> None:
    lines: list[str] = []
    first = make_model(name, on_progress=lines.append)
    again = make_model(name, tmp_path / "again", on_progress=lines.append)
    other = make_model(name, tmp_path / "other", seed=1, on_progress=lines.append)
    assert first.parent == short_warm_up
    files = sorted(path.name for path in first.iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", STABLE} <= set(files)
    assert [(again / file).read_bytes() for file in files] == [(first / file).read_bytes() for file in files]
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()
    assert len({path.stat().st_mode for path in first.iterdir()}) == 1, "whoever reads the one may read the others"
    assert lines[0].startswith(f"{name}: building it at ")


@pytest.mark.slow
def test_what_is_in_the_cache_is_not_built_again(short_warm_up: Path) -> None:
    lines: list[str] = []
    first = resolve_model("tiny-dense", lines.append)
    changed = (first / "model.safetensors").stat().st_mtime_ns
    lines.clear()
    assert resolve_model("tiny-dense", lines.append) == first
    assert lines == []
    assert (first / "model.safetensors").stat().st_mtime_ns == changed


BUILD = """
import sys
import counterpoint.models.warm_up
from counterpoint.models.build import make_model

counterpoint.models.warm_up.SKILL_STEPS = counterpoint.models.warm_up.MIXTURE_STEPS = int(sys.argv[1])
print(make_model("tiny-dense", on_progress=lambda line: print(line, flush=True)))
"""


def _start_builder(steps: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", BUILD, str(steps)], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_builders_at_once_build_once(short_warm_up: Path) -> None:
    builders = [_start_builder(steps=1) for _ in range(2)]
    outputs = [builder.communicate(timeout=120)[0].splitlines() for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    assert sum("building it at" in line for output in outputs for line in output) == 1


@pytest.mark.slow
def test_a_killed_builder_neither_blocks_nor_spoils_the_next(short_warm_up: Path) -> None:
    with _start_builder(steps=10**6) as builder:
        assert builder.stdout is not None
        assert "building it at" in builder.stdout.readline()
        builder.kill()
    lines: list[str] = []
    assert (make_model("tiny-dense", on_progress=lines.append) / STABLE).exists()
    assert "built in" in lines[-1]
    assert not list(short_warm_up.glob("*.partial"))


@pytest.mark.slow
def test_a_failed_build_leaves_nothing_and_the_next_one_succeeds(
    short_warm_up: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(counterpoint.models.warm_up, "_learn", _run_out_of_space)
        with pytest.raises(OSError, match="No space left"):
            make_model("tiny-dense", on_progress=lambda line: None)
    assert [path for path in short_warm_up.iterdir() if not path.name.endswith(".lock")] == []
    assert (make_model("tiny-dense", on_progress=lambda line: None) / STABLE).exists()


def _run_out_of_space(*_: object) -> float:
    raise OSError(28, "No space left on device")


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("COUNTERPOINT_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert counterpoint.models.build.cache_directory() == tmp_path / ".cache" / "counterpoint"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert counterpoint.models.build.cache_directory() == Path("/x/counterpoint")
    monkeypatch.setenv("COUNTERPOINT_CACHE", "/chosen")
    assert counterpoint.models.build.cache_directory() == Path("/chosen")


def test_another_seed_or_name_is_another_model() -> None:
    fingerprints = {
        counterpoint.models.build._fingerprint(name, seed) for name in ("tiny-moe", "tiny-dense") for seed in (0, 1)
    }
    assert len(fingerprints) == 4
    assert counterpoint.models.build._fingerprint("tiny-moe", 0) in fingerprints


def test_a_local_directory_is_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a model: it has no"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_built_in_model_without_torch_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"^model = 'tiny-dense' is built .* needs torch, .*counterpoint\[cpu\]"):
        resolve_model("tiny-dense")


def test_a_missing_directory_is_not_taken_for_a_hub_name() -> None:
    with pytest.raises(ValueError, match="there is no such directory"):
        resolve_model("./none")


@pytest.mark.slow
def test_a_misspelt_name_is_answered_with_the_nearest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"'tiny-mo' is no directory .* did you mean 'tiny-moe'\?\)"):
        resolve_model("tiny-mo")
    with pytest.raises(ValueError, match=r"not built in \(.*; did you mean 'tiny-dense'\?\)"):
        make_model("tny-dense")


def test_a_name_is_refused_only_if_the_hub_says_that_it_has_no_such_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub.errors import RepositoryNotFoundError  # its library takes long to import

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    answer: list[Any] = [object()]

    def model_info(self: object, name: str, timeout: float) -> object:
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    assert check_model("tiny-moe") == ""
    assert check_model("someone/model") == ""
    answer[0] = OSError("no way there")
    assert check_model("tiny-dens") == (
        "model = 'tiny-dens' is not here; did you mean 'tiny-dense'?; the hub cannot be asked: OSError: no way there"
    )
    answer[0] = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    with pytest.raises(ValueError, match=r"model = 'someone/model' .*RepositoryNotFoundError: "):
        check_model("someone/model")
    with pytest.raises(ValueError, match="model = 'no model' is no directory here"):
        check_model("no model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="model = 'someone/model' is no directory here"):
        check_model("someone/model")
    assert os.listdir(tmp_path) == []


def test_a_directory_in_use_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is in use"):
        make_model("tiny-moe", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
