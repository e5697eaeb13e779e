"""What a probe says of the version before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from counterpoint.inference.base import Probe
from counterpoint.trainer.model.load import load_model
from counterpoint.trainer.probe import Answers, ask, ask_together, check_base, write_probe
from tests.trainer.many_runs import Bench


@pytest.mark.parametrize(("dtype", "known"), [("float32", True), ("bfloat16", False)])
def test_only_a_precise_model_tells_the_answers_of_the_version_before(
    dense_directory: Path, tmp_path: Path, dtype: str, known: bool
) -> None:
    """In bfloat16 they differ from those of this version by rounding, and a right server would seem to hold the other."""
    model, file = load_model(dense_directory, dtype, torch.device("cpu")), tmp_path / "probe.json"
    before = write_probe(model, 1, file, 0, {}, None)
    assert json.loads(file.read_text())["previous"] is None
    write_probe(model, 2, file, 0, {}, before)
    written = json.loads(file.read_text())
    assert written["previous"] == (written["log_probabilities"] if known else None)


def test_a_version_before_without_finite_answers_is_left_out(dense_directory: Path, tmp_path: Path) -> None:
    """A probe with one could not be read. Which candidate is published depends on the version."""
    model, file = load_model(dense_directory, "float32", torch.device("cpu")), tmp_path / "probe.json"
    before = write_probe(model, 1, file, 0, {}, None)
    write_probe(model, 2, file, 0, {}, torch.full_like(before, torch.nan))
    assert Probe.read(file).previous is None


def test_what_takes_the_place_of_a_probe_while_it_is_read_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of an adapter may be another user's, who puts a FIFO there once the regular file is open."""
    file, real = tmp_path / "probe.json", os.open
    file.write_text(json.dumps({"version": 1, "token_ids": [1, 2], "log_probabilities": [-1.0]}))
    opened: list[str] = []

    def open_and_replace(path: str | os.PathLike[str], flags: int, mode: int = 0o777) -> int:
        descriptor = real(path, flags, mode)
        opened.append(os.fspath(path))
        file.unlink()
        os.mkfifo(file)
        return descriptor

    answers = Answers(torch.tensor([[1, 2]]), torch.tensor([[-1.0]]), 0, torch.zeros(1))
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_and_replace)
        check_base(tmp_path, answers)
    assert opened == [str(file)]
    with pytest.raises(ValueError, match="is a FIFO; expected a regular file"):
        check_base(tmp_path, answers)


@pytest.mark.parametrize(
    ("shift", "said"),
    [(0.05, None), (0.2, "from those in"), (0.49, "from those in"), (0.51, "refused"), (float("nan"), "refused")],
)
def test_another_base_is_far_from_the_published_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shift: float, said: str | None
) -> None:
    """The answers spread by 1; up to a tenth is what rounding does."""
    values = [-1.0, -3.0, -1.0, -3.0]
    (tmp_path / "probe.json").write_text(
        json.dumps({"version": 1, "token_ids": [1, 2, 3, 4, 5], "log_probabilities": values})
    )
    answers = Answers(
        torch.tensor([[9, 8, 7, 6, 5], [1, 2, 3, 4, 5]]), torch.tensor([values, values]) + shift, torch.zeros(2, 4), 0
    )
    if said == "refused":
        with pytest.raises(ValueError, match="another base model"):
            check_base(tmp_path, answers)
        return
    check_base(tmp_path, answers)
    assert (said or "") in caplog.text
    assert bool(caplog.records) == (said is not None)


@pytest.mark.parametrize(("kind", "row_tokens"), [("dense", 10_000), ("dense", 300), ("moe", 10_000)])
def test_adapters_answer_together_as_they_do_alone(kind: str, row_tokens: int, request: pytest.FixtureRequest) -> None:
    """They are asked in one pass, or in two of two adapters at most, and one whose numbers are not finite harms no other."""
    bench = Bench(request.getfixturevalue(f"{kind}_directory"))
    for slot in range(3):
        bench.admit(slot, rank=4)
        for parameter in bench.parameters(slot).values():
            torch.nn.init.normal_(parameter, mean=torch.nan if slot == 1 else 0.0, std=0.1)
    alone = [ask(bench.model, slot) for slot in range(3)]
    for slot, found in enumerate(ask_together(bench.model, range(3), row_tokens)):
        assert found.chosen == alone[slot].chosen
        torch.testing.assert_close(found.tokens_CT, alone[slot].tokens_CT)
        torch.testing.assert_close(found.values_CP, alone[slot].values_CP, atol=1e-4, rtol=1e-4, equal_nan=True)
        torch.testing.assert_close(found.rounding_P, alone[slot].rounding_P, atol=1e-3, rtol=1e-2, equal_nan=True)
        assert bool(found.values_CP.isfinite().all()) == (slot != 1)
    assert (alone[0].values_CP - alone[2].values_CP).abs().max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_other_precision_of_the_same_base_passes_and_another_base_does_not(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """With weights so large that rounding changes which experts compute a token."""
    config = AutoConfig.from_pretrained(request.getfixturevalue(f"{kind}_directory"))
    config.initializer_range = 0.3
    for seed in range(2):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / str(seed))
        model = load_model(tmp_path / str(seed), "bfloat16", torch.device("cpu"))
        write_probe(model, 1, tmp_path / str(seed) / "probe.json", 0, {}, None)
    answers = ask(load_model(tmp_path / "0", "float32", torch.device("cpu")), 0)
    check_base(tmp_path / "0", answers)
    with pytest.raises(ValueError, match="another base model"):
        check_base(tmp_path / "1", answers)
