"""How many suspicions are tried, by weights that only note what is put."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from counterpoint.trainer.again.causes import MOST_TRIED, _suspicions


class Files:
    """Versions without weights, and what was put of them."""

    def __init__(self, versions: int, layers: int) -> None:
        self.versions = list(range(versions))
        self.layers = ["", *(str(layer) for layer in range(layers - 1))]
        self.now = dict.fromkeys(self.layers, -1)

    def put(self, version: int, layer: str | None = None) -> None:
        self.now |= dict.fromkeys(self.layers if layer is None else [layer], version)


@pytest.mark.parametrize(("versions", "layers"), [(3, 4), (200, 80)])
def test_suspicions_are_bounded_and_the_newest_are_tried(
    versions: int, layers: int, caplog: pytest.LogCaptureFixture
) -> None:
    run: Any = SimpleNamespace(run=SimpleNamespace(config=SimpleNamespace(training=SimpleNamespace(lora=None))))
    files: Any = Files(versions, layers)
    version, computations, tried = versions - 1, [], []

    def left(temperature: float = 1.0) -> float:
        computations.append(temperature)
        return 1.0

    with caplog.at_level(logging.INFO):
        for words, _ in _suspicions(run, version, [0.7, 1.0], left, files):
            tried.append(words)
            if "layer" in words:
                assert sorted(files.now.values())[1:] == [version] * (layers - 1)
    others, pairs = versions - 1, (versions - 1) * layers
    assert len(tried) == min(others, MOST_TRIED) + 1 + min(pairs, MOST_TRIED)
    assert len(computations) == len(tried) - 1 + 35 - 1
    assert tried[0].endswith(f"of version {version - 1}, not {version}")
    newest = [words for words in tried if "layer" in words][:layers]
    assert all(words.endswith(f"of version {version - 1}, not {version}") for words in newest)
    assert (
        f"trying {min(pairs, MOST_TRIED)} of {pairs} layers of older versions, on up to 8 samples each" in caplog.text
    )
