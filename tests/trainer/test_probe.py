"""What a probe says of the version before."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from inference.base import Probe
from trainer.model.load import load_model
from trainer.probe import Answers, check_base, write_probe


@pytest.mark.parametrize(("dtype", "known"), [("float32", True), ("bfloat16", False)])
def test_only_a_precise_model_tells_the_answers_of_the_version_before(
    dense_directory: Path, tmp_path: Path, dtype: str, known: bool
) -> None:
    """In bfloat16 they differ from those of this version by rounding, and a right server would seem to hold the other."""
    model, file = load_model(dense_directory, dtype, torch.device("cpu")), tmp_path / "probe.json"
    before = write_probe(model, None, 1, file, 0, {}, None)
    assert json.loads(file.read_text())["previous"] is None
    write_probe(model, None, 2, file, 0, {}, before)
    written = json.loads(file.read_text())
    assert written["previous"] == (written["log_probabilities"] if known else None)


def test_a_version_before_without_finite_answers_is_left_out(dense_directory: Path, tmp_path: Path) -> None:
    """A probe with one could not be read. Which candidate is published depends on the version."""
    model, file = load_model(dense_directory, "float32", torch.device("cpu")), tmp_path / "probe.json"
    before = write_probe(model, None, 1, file, 0, {}, None)
    write_probe(model, None, 2, file, 0, {}, torch.full_like(before, torch.nan))
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

    answers = Answers(torch.tensor([[1, 2]]), torch.tensor([[-1.0]]), 0)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_and_replace)
        check_base(tmp_path, answers)
    assert opened == [str(file)]
    with pytest.raises(ValueError, match="is a FIFO; expected a regular file"):
        check_base(tmp_path, answers)
