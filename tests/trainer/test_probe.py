"""What a probe says of the version before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from inference.base import Probe
from trainer.model.load import load_model
from trainer.probe import write_probe


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
