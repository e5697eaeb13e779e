"""Probes: how they are read, and what they let pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from inference.base import Probe, SamplingParameters


def test_a_probe_is_read_as_it_was_published(tmp_path: Path) -> None:
    path = tmp_path / "probe.json"
    path.write_bytes(orjson.dumps({"version": 3, "token_ids": [1, 2, 3], "log_probabilities": [-1.5, -2]}))
    assert Probe.read(path) == Probe(3, [1, 2, 3], [-1.5, -2.0])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"version": 1}',
        b'{"version": 1, "token_ids": [1], "log_probabilities": []}',
        b'{"version": 1, "token_ids": [1, 2], "log_probabilities": [-1, -2]}',
        b'{"version": 1, "token_ids": [1, 2], "log_probabilities": [null]}',
        b'{"version": 1, "token_ids": [1, 2], "log_probabilities": ["x"]}',
        b" " * ((1 << 20) + 1),
    ],
)
def test_what_is_no_probe_is_refused_by_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "probe.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"probe\.json"):
        Probe.read(path)


def test_a_probe_passes_within_the_tolerance_and_names_what_differs() -> None:
    probe = Probe(1, [5, 6, 7], [-1.0, -2.0])
    assert probe.mismatch(np.array([-1.01, -1.99], dtype=np.float32), 0.02) is None
    assert "probe token 2 is -2.5000 at the server and -2.0000 at the trainer" in str(
        probe.mismatch(np.array([-1.0, -2.5], dtype=np.float32), 0.02)
    )


@pytest.mark.parametrize("answer", [[-1.0], [-1.0, np.nan], [-np.inf, -2.0]])
def test_an_incomplete_or_infinite_answer_never_passes(answer: list[float]) -> None:
    assert Probe(1, [5, 6, 7], [-1.0, -2.0]).mismatch(np.array(answer, dtype=np.float32), 1e9)


@pytest.mark.parametrize(
    ("temperature", "max_tokens"), [(0.0, 1), (-1.0, 1), (float("inf"), 1), (float("nan"), 1), (1.0, 0)]
)
def test_sampling_that_makes_no_sense_is_refused(temperature: float, max_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"temperature|max_tokens"):
        SamplingParameters(temperature, max_tokens, ())
