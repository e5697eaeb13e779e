"""Reads from vLLM's `/metrics` the numbers that `capacity` and the pool's `progress` need.

The text has thousands of lines, nearly all of them histograms, and is read on the event loop at every observation: so it is
searched, not parsed. Names and labels are those of vLLM 0.32 (`vllm/v1/metrics/loggers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from counterpoint.inference.clients.capacity import Observation

_CACHE_USE = b"vllm:kv_cache_usage_perc"
_RUNNING = b"vllm:num_requests_running"
_WAITING = b"vllm:num_requests_waiting"
_WAITING_BY_REASON = b"vllm:num_requests_waiting_by_reason"
_PREEMPTIONS = b"vllm:num_preemptions_total"
_TOKENS = (b"vllm:prompt_tokens_total", b"vllm:generation_tokens_total")


def read_load(text: bytes | memoryview) -> Observation | None:
    """Returns the load in `text`, all engines of a server together; None if the text is not vLLM's or has no numbers."""
    text = bytes(text)
    try:
        cache_use = [value for _, value in _samples(text, _CACHE_USE)]
        running = [value for _, value in _samples(text, _RUNNING)]
        waiting = [value for _, value in _samples(text, _WAITING)]
        by_reason = list(_samples(text, _WAITING_BY_REASON))
        preemptions = [value for _, value in _samples(text, _PREEMPTIONS)]
        if not (cache_use and running and waiting):
            return None
        held = int(sum(running) + sum(waiting))
        tokens = int(sum(value for name in _TOKENS for _, value in _samples(text, name)))
        if by_reason:  # Others are deferred, as until their adapter has a slot, which is no load.
            waiting = [value for labels, value in by_reason if b'reason="capacity"' in labels]
        return Observation(max(cache_use), int(sum(running)), int(sum(waiting)), int(sum(preemptions)), held, tokens)
    except (ValueError, OverflowError):
        return None


def _samples(text: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """Yields labels and value of every sample of `name`. Raises `ValueError` for a value that is no number."""
    start = text.find(b"\n" + name + b"{")
    while start >= 0:
        end = text.find(b"\n", start + 1)
        line = text[start + 1 : end if end >= 0 else len(text)]
        labels, _, value = line.rpartition(b" ")
        yield labels, float(value)
        start = text.find(b"\n" + name + b"{", start + 1)
