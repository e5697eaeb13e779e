"""The split of a recorded step's mismatch: it adds up, agrees with float64, and names a planted fault and only that.

The trainer is a process. The servers are models of transformers, which answer by the published weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec import convert
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from counterpoint.cli.main import main
from counterpoint.trainer.again.computed import in_float32
from counterpoint.trainer.again.mismatch import PlayedRollout, PlayedTurn, groups_of
from counterpoint.trainer.again.outliers import KEYS
from counterpoint.trainer.again.split import divergence
from counterpoint.transport.records import Batch
from tests.trainer.again.recorded import STEPS, record
from tests.trainer.conftest import make_batch

pytestmark = pytest.mark.slow

LORA = {"rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
LENGTHS = (9, 12, 15, 18) * 14
WARMER = 1.3

Answer = Callable[[nn.Module, torch.Tensor, float], torch.Tensor]


def answer(model: nn.Module, tokens_T: torch.Tensor, temperature: float) -> torch.Tensor:
    """The log-probabilities of all tokens but the first, `[T - 1]`."""
    logits_TV = model(tokens_T[None]).logits[0, :-1].double() / temperature
    return logits_TV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]


class Servers:
    """Two servers, `a` and `b`, that have answered every other sample each, by versions of up to `lags` steps before."""

    def __init__(self, output_dir: Path, base: Path, lags: int = 1, dtype: torch.dtype = torch.float32) -> None:
        self.output_dir, self.base, self._lags, self._dtype = output_dir, base, lags, dtype
        self.names, self.truncated = "ab", {"top_p": 1.0}
        self.fault: Callable[[str, int, nn.Module], nn.Module] = lambda server, version, model: model
        """What a server makes of the weights of a version."""
        self.heat: Callable[[str, float], float] = lambda server, temperature: temperature
        """What a server makes of a temperature."""
        self.answer: Answer = answer
        self._models: dict[tuple[str, int], nn.Module] = {}

    def make(self, step: int) -> Batch:
        """The batch of a step; keeps it, and the records of its rollouts."""
        batch = make_batch(step, LENGTHS)
        samples, lines = [], []
        for index, sample in enumerate(batch.samples):
            version, server = max(0, step - 1 - index // 2 % self._lags), self.names[index % 2]
            samples.append(replace(sample, policy_version=version, temperature=0.8 + 0.1 * (index % 3)))
            if (server, version) not in self._models:
                self._models[server, version] = self.fault(server, version, self.model(version))
            self._fill(batch, index, self._models[server, version], self.heat(server, samples[-1].temperature))
            tokens = int(batch.loss_mask_T[slice(*batch.sample_offsets[index : index + 2])].sum())
            turn: dict[str, Any] = {"server": server, "load": f"{version}:{version}-{version}"}
            turn |= {"policy_version": version, "prompt_tokens": LENGTHS[index] - tokens, "completion_tokens": tokens}
            lines.append({"rollout_id": sample.rollout_id, "turns": [turn], "sampling_args": self.truncated})
        self.records = "".join(json.dumps(each) + "\n" for each in lines)
        self.batch = replace(batch, samples=tuple(samples))
        return self.batch

    def model(self, version: int, dtype: torch.dtype | None = None) -> nn.Module:
        """The weights of a version, as transformers has them, by default in the servers' precision."""
        published = self.output_dir / "run_default" / "broadcast" / f"step_{version}"
        is_adapter = (published / "adapter_config.json").exists()
        place = self.base if is_adapter else published
        model: nn.Module = AutoModelForCausalLM.from_pretrained(place, dtype=dtype or self._dtype).eval()
        return PeftModel.from_pretrained(model, published).eval() if is_adapter else model

    @torch.no_grad()
    def reference(self) -> dict[str, float]:
        """The whole mismatch of the last batch, and what is left without staleness, by models in float64."""
        models = {version: self.model(version, torch.float64) for version in range(STEPS)}
        found: dict[str, list[npt.NDArray[np.float64]]] = {"now": [], "then": []}
        for index, sample in enumerate(self.batch.samples):
            start, end = (int(each) for each in self.batch.sample_offsets[index : index + 2])
            tokens_T = torch.from_numpy(self.batch.token_ids_T[start:end]).long()
            own = self.batch.loss_mask_T[start + 1 : end] != 0
            inference = self.batch.columns["log_probabilities_T"][start + 1 : end][own].astype(np.float64)
            for name, version in (("now", STEPS - 1), ("then", sample.policy_version)):
                values = answer(models[version], tokens_T, sample.temperature).numpy()[own]
                found[name].append(divergence(values, inference))
        return {name: float(np.concatenate(each).mean()) for name, each in found.items()}

    @torch.no_grad()
    def _fill(self, batch: Batch, index: int, model: nn.Module, temperature: float) -> None:
        start, end = (int(each) for each in batch.sample_offsets[index : index + 2])
        found = self.answer(model, torch.from_numpy(batch.token_ids_T[start:end]).long(), temperature).numpy()
        column_T = batch.columns["log_probabilities_T"]
        column_T[start + 1 : end] = np.where(batch.loss_mask_T[start + 1 : end], found, 0)


async def split(
    servers: Servers, capsys: pytest.CaptureFixture[str], dtype: str = "float32", **training: Any
) -> tuple[dict[str, Any], str]:
    """What the command says of the last step, in JSON and for a person."""
    trainer = {"keep_broadcasts": 9, "dtype": dtype, "max_tokens": 96}
    await record(servers.output_dir, servers.base, trainer, servers.make, learning_rate=3e-3, **training)
    (servers.output_dir / "run_default" / "rollouts" / f"step_{STEPS}" / "rollouts.jsonl").write_text(servers.records)
    return said_of(servers.output_dir, capsys)


def said_of(job: Path, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    said = []
    for flags in (["--json"], []):
        capsys.readouterr()
        assert main(["mismatch", str(job), "--run", "default", "--step", str(STEPS), *flags]) == 0
        said.append(capsys.readouterr().out)
    return json.loads(said[0]), said[1]


@pytest.mark.parametrize("lags", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_split_adds_up_and_agrees_with_float64(
    lags: int, dtype: str, dense_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = Servers(tmp_path, dense_directory, lags, getattr(torch, dtype))
    found, said = await split(servers, capsys, dtype)
    parts, reference = found["parts"], servers.reference()
    assert found["recorded"] > 0
    assert sum(parts.values()) == pytest.approx(found["recorded"], rel=0.05, abs=1e-9), said
    assert found["adds_up"]
    compared = ["server", "load", *(["version"] if lags > 1 else []), "position", "temperature", "environment"]
    assert found["compared"] == compared
    assert f"compared by {', '.join(compared)}: none stands out" in said
    assert (found["fault"], parts["fault"], parts["unknown"]) == (None, 0, 0), said
    assert list(found["by_lag"]) == [str(lag) for lag in range(1, lags + 1)]
    assert parts["kernels"] == pytest.approx(reference["then"], rel=0.01, abs=1e-11), said
    if dtype == "float32":
        assert parts["precision"] == 0
        assert parts["staleness"] == pytest.approx(reference["now"] - reference["then"], rel=1e-3, abs=1e-11), said
        assert (parts["staleness"] > 1e-4) == (lags > 1)
    else:
        assert parts["kernels"] > 1e-7
        # The servers round as the trainer does, so that neither is seen in the whole.
        assert parts["precision"] == pytest.approx(-parts["kernels"], rel=0.05), said
        assert parts["staleness"] == pytest.approx(reference["now"] - reference["then"], rel=0.3, abs=1e-7), said
    if lags == 1:
        assert parts["staleness"] == 0


async def test_several_updates_a_step(
    dense_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All tokens are computed with the weights before the step. The recorded value is also of those between its updates."""
    servers = Servers(tmp_path, dense_directory, 2)
    found, said = await split(servers, capsys, updates_per_step=2)
    reference = servers.reference()
    assert found["computed"] == pytest.approx(reference["now"], rel=1e-3)
    assert found["parts"]["staleness"] == pytest.approx(reference["now"] - reference["then"], rel=1e-3)
    assert found["fault"] is None
    assert found["recorded"] > 1.1 * found["computed"]
    assert "the two are not the same: the weights move between the step's updates" in said


@dataclass
class Planted:
    """A fault, and what is said of it."""

    plant: Callable[[Servers], None]
    group: tuple[str, str]
    explanation: str
    adapter: bool = False


def of_b(change: Callable[[Servers, int, nn.Module], nn.Module], only: int | None = None) -> Callable[[Servers], None]:
    """The server `b` has other weights, or only of one version."""

    def plant(servers: Servers) -> None:
        def fault(server: str, version: int, model: nn.Module) -> nn.Module:
            return change(servers, version, model) if server == "b" and only in (None, version) else model

        servers.fault = fault

    return plant


def of_another_run(servers: Servers, version: int, model: nn.Module) -> nn.Module:
    """A slot swapped: the adapter of another run of the job."""
    published = servers.output_dir / "run_other" / "broadcast" / "step_7"
    if not published.exists():
        own = servers.output_dir / "run_default" / "broadcast" / "step_0"
        published.mkdir(parents=True)
        generator = torch.Generator().manual_seed(5)
        tensors = load_file(own / "adapter_model.safetensors")
        moved = {name: each + 0.1 * torch.randn(each.shape, generator=generator) for name, each in tensors.items()}
        save_file(moved, published / "adapter_model.safetensors")
        (published / "adapter_config.json").write_bytes((own / "adapter_config.json").read_bytes())
        (published / "STABLE").touch()
        control = servers.output_dir / "run_other" / "control"
        control.mkdir()
        (control / "orch.toml").touch()
    base = AutoModelForCausalLM.from_pretrained(servers.base, dtype=torch.float32).eval()
    return PeftModel.from_pretrained(base, published).eval()


def without_adapter(servers: Servers, version: int, model: nn.Module) -> nn.Module:
    base: nn.Module = AutoModelForCausalLM.from_pretrained(servers.base, dtype=torch.float32).eval()
    return base


def of_version_before(servers: Servers, version: int, model: nn.Module) -> nn.Module:
    return servers.model(version - 1)


def with_old_layer(servers: Servers, version: int, model: nn.Module) -> nn.Module:
    layer, former = (each.get_submodule("model.layers.1") for each in (model, servers.model(version - 1)))
    layer.load_state_dict(former.state_dict())
    return model


def warmer(who: str, temperature: float | None = None) -> Callable[[Servers], None]:
    """Servers are warmer than they say: those of `who`, or only where they are asked for one temperature."""

    def plant(servers: Servers) -> None:
        servers.heat = lambda server, given: (
            WARMER * given if server in who and (temperature is None or abs(given - temperature) < 1e-9) else given
        )

    return plant


def forgetful(servers: Servers) -> None:
    """No server sees further back than three tokens, from the fifth token of a completion on."""

    def forgets(model: nn.Module, tokens_T: torch.Tensor, temperature: float) -> torch.Tensor:
        found_T = answer(model, tokens_T, temperature)
        for place in range(max(1, len(tokens_T) // 3) + 4, len(tokens_T)):
            found_T[place - 1] = answer(model, tokens_T[place - 3 : place + 1], temperature)[-1]
        return found_T

    servers.answer = forgets


LAYER = f"layer 1 of the weights that sampled them was that of version {STEPS - 2}, not {STEPS - 1}"
OLD = f"version {STEPS - 2}, not {STEPS - 1}"
NEWEST_OF_B = f"{STEPS - 1}:{STEPS - 1}-{STEPS - 1} of server b"

PLANTED = {
    "slot": Planted(of_b(of_another_run), ("server", "b"), "by the adapter of run other, version 7", True),
    "no adapter": Planted(of_b(without_adapter), ("server", "b"), "by the base model, without the adapter", True),
    "temperature": Planted(warmer("b"), ("server", "b"), "at 1.3 times their temperature", True),
    "one temperature": Planted(warmer("ab", 0.9), ("temperature", "0.9"), "at temperature 1.17, not 0.9"),
    "layer": Planted(of_b(with_old_layer, STEPS - 1), ("load", NEWEST_OF_B), LAYER),
    "version": Planted(of_b(of_version_before, STEPS - 1), ("load", NEWEST_OF_B), f"by the weights of {OLD}"),
    "position": Planted(forgetful, ("position", "4 and later"), ""),
    "everywhere": Planted(warmer("ab"), ("all", "all"), "at 1.3 times their temperature"),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANTED)
async def test_a_planted_fault_is_named_and_only_that(
    case: str, dense_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers, planted = Servers(tmp_path, dense_directory, 2), PLANTED[case]
    planted.plant(servers)
    found, said = await split(servers, capsys, lora=LORA if planted.adapter else None)
    fault, parts = found["fault"], found["parts"]
    assert fault is not None, said
    assert (fault["key"], fault["group"]) == planted.group, said
    expected = f"they were sampled {planted.explanation}"
    if planted.explanation[:2] not in ("by", "at"):
        expected = planted.explanation
    assert fault["explanation"] == expected, said
    assert (expected or "nothing that was tried explains them") in said
    assert (", of the adapter of run default, have" in said) == planted.adapter, said
    assert parts["fault"] > 0.9 * (parts["fault"] + parts["kernels"])
    assert found["adds_up"], said


def noisy(size: float) -> Answer:
    """Kernels that disturb each logit by noise of this size."""
    generator = torch.Generator().manual_seed(3)

    def noisily(model: nn.Module, tokens_T: torch.Tensor, temperature: float) -> torch.Tensor:
        logits_TV = model(tokens_T[None]).logits[0, :-1].double()
        logits_TV = (logits_TV + size * torch.randn(logits_TV.shape, generator=generator)) / temperature
        return logits_TV.log_softmax(-1).gather(1, tokens_T[1:, None])[:, 0]

    return noisily


def truncating(model: nn.Module, tokens_T: torch.Tensor, temperature: float) -> torch.Tensor:
    """A distribution of which only a part is sampled, more of it where the model is less sure."""
    found_T = answer(model, tokens_T, temperature)
    return found_T - torch.log(0.5 + 0.4 * found_T.exp())


async def test_large_noise_is_no_fault_nor_is_truncation(
    dense_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, how, truncated in (("noise", noisy(0.2), {"top_p": 1.0}), ("truncation", truncating, {"top_p": 0.8})):
        servers = Servers(tmp_path / name, dense_directory, 2)
        servers.answer, servers.truncated = how, truncated
        servers.output_dir.mkdir()
        found, said = await split(servers, capsys)
        assert found["parts"]["kernels"] > 0.01, said
        assert found["fault"] is None, said
        assert ("top_p, top_k or min_p" in said) == (name == "truncation")


async def test_without_room_and_without_records(
    dense_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without room for the weights nothing is tried, which is said. Without records no server is known."""
    servers = Servers(tmp_path, dense_directory, 2)
    warmer("b")(servers)
    found, _ = await split(servers, capsys)
    assert found["fault"]["group"] == "b"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    found, said = said_of(tmp_path, capsys)
    assert found["fault"]["group"] == "b"
    assert "was not looked for: the weights of 3 versions take" in said
    assert "set TMPDIR to a directory with more" in said
    (tmp_path / "run_default" / "rollouts" / f"step_{STEPS}" / "rollouts.jsonl").unlink()
    found, said = said_of(tmp_path, capsys)
    assert (found["fault"], found["truncated"]) == (None, None), said
    assert "nothing could be compared: no two groups have 48 tokens" in said
    assert "was not looked for" in said


def test_groups_of_tokens() -> None:
    """A turn's tokens have its server; where no turn or several fit, none. Equal contexts are those of equal tokens so far."""
    batch = make_batch(4, (12, 12, 12))
    tokens_ST, mask_ST = batch.token_ids_T.reshape(3, 12), batch.loss_mask_T.reshape(3, 12)
    tokens_ST[1], tokens_ST[2] = tokens_ST[0], tokens_ST[0]
    tokens_ST[1, 9] += 1
    mask_ST[0, [5, 7, 8]] = 0  # one token of the first turn is not trained, and the second begins at 9
    samples = [replace(each, rollout_id="4-1") if index else each for index, each in enumerate(batch.samples)]
    batch = replace(batch, samples=tuple(samples))
    turns = [
        PlayedRollout("4-0", [PlayedTurn("a", "x:2-2", 2, 4, 3, 1), PlayedTurn("b", "", 1, 9, 3)]),
        PlayedRollout("4-1", [PlayedTurn("a", "x:2-2", 2, 4, 8)]),
    ]

    def found(batch: Batch) -> dict[str, list[str]]:
        groups = groups_of(batch, turns)
        return {key: [groups.named(key, each[None]) if each >= 0 else "" for each in groups.codes[key]] for key in KEYS}

    values = found(batch)
    assert values["server"] == ["a"] * 2 + ["b"] * 3 + [""] * 16
    assert values["load"] == ["x:2-2 of server a"] * 2 + [""] * 19
    assert values["version"] == ["2"] * 2 + ["1"] * 3 + ["3"] * 16
    assert values["position"] == ["0", "2", "0", "1", "2"] + [""] * 16
    assert values["rollout"] == ["4-0"] * 5 + ["4-1"] * 16
    assert values["temperature"] == ["0.6"] * 5 + ["0.8"] * 8 + ["1"] * 8
    mask_ST[2, 4] = 0  # now one sample alone has such a turn
    assert found(batch)["server"] == ["a"] * 2 + ["b"] * 3 + ["a"] * 8 + [""] * 7
    mask_ST[:, 4:] = 1
    groups = groups_of(batch, turns)
    assert groups.codes["lag"].tolist() == [1] * 5 + [3] * 3 + [1] * 16
    context_ST = groups.codes["context"].reshape(3, 8)
    assert (context_ST[0] == context_ST[2]).all()
    assert (context_ST[0] == context_ST[1]).tolist() == [True] * 5 + [False] * 3
    assert len(np.unique(context_ST[0])) == 8


@pytest.mark.parametrize(
    ("sampling", "truncated"),
    [
        ({}, False),
        ({"top_p": 1, "top_k": 0, "min_p": 0.0, "temperature": 0.7}, False),
        ({"top_k": -1}, False),
        ({"top_k": 50}, True),
        ({"top_p": 0.95}, True),
        ({"min_p": 0.05}, True),
    ],
)
def test_what_truncates(sampling: dict[str, Any], truncated: bool) -> None:
    assert convert({"rollout_id": "1-0", "sampling_args": sampling}, PlayedRollout).truncated == truncated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_float32_during_the_block_and_the_same_after_it(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 3).to(dtype)
    before = model.weight.detach().clone()
    with in_float32(model) as changed:
        assert model.weight.dtype == torch.float32
        assert changed == (dtype != torch.float32)
    assert model.weight.dtype == dtype
    assert torch.equal(model.weight, before)
