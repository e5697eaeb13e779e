"""What a training pass holds at once, counted exactly: layer inputs, and no tensor of tokens times vocabulary."""

from __future__ import annotations

import pytest

from counterpoint.trainer.model import chunks
from tests.support import step_memory
from tests.support.step_memory import Setting, peak_bytes

HIDDEN = 32
TOKENS, VOCABULARY = 1024, 4096


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_memory, "HIDDEN", HIDDEN)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 2**16)


def interaction(**options: bool) -> float:
    """How much more twice the tokens with twice the vocabulary take than both alone, over the logits that are then more."""
    peaks = {
        (tokens, vocabulary): peak_bytes(Setting(1, tokens, vocabulary=vocabulary, **options))
        for tokens in (TOKENS, 2 * TOKENS)
        for vocabulary in (VOCABULARY, 2 * VOCABULARY)
    }
    more = peaks[2 * TOKENS, 2 * VOCABULARY] - peaks[2 * TOKENS, VOCABULARY]
    less = peaks[TOKENS, 2 * VOCABULARY] - peaks[TOKENS, VOCABULARY]
    return (more - less) / (TOKENS * VOCABULARY * 4)


@pytest.mark.slow
def test_no_tensor_has_tokens_times_vocabulary() -> None:
    assert interaction() == 0


@pytest.mark.slow
def test_whole_logits_would_be_seen() -> None:
    assert interaction(chunked=False) >= 2, "logits, and their softmax, at least"


@pytest.mark.slow
def test_a_layer_keeps_its_input_alone() -> None:
    two, five = (peak_bytes(Setting(layers, TOKENS, vocabulary=VOCABULARY)) for layers in (2, 5))
    state = TOKENS * HIDDEN * 4
    assert state <= (five - two) / 3 <= 1.5 * state
    plain = [peak_bytes(Setting(layers, TOKENS, vocabulary=VOCABULARY, checkpointed=False)) for layers in (2, 5)]
    assert (plain[1] - plain[0]) / 3 > 10 * state
