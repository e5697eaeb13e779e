"""What a model's config.json says of how it can be served, read before vLLM starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def longest_context(model: Mapping[str, Any]) -> int | None:
    """Returns the most tokens that vLLM 0.30 lets the model of this config.json have; None if the file alone does not say so.

    `max_position_embeddings` is a bound for all but models whose rotary positions are scaled by a factor, which vLLM multiplies
    for some kinds of scaling, and those with a `model_max_length` of their own, which vLLM takes instead if it is larger.
    """
    text = model.get("text_config")
    parts = [model, *([text] if isinstance(text, Mapping) else [])]
    if any("model_max_length" in part for part in parts):
        return None
    if any(_scales(part.get(key)) for part in parts for key in ("rope_scaling", "rope_parameters")):
        return None
    lengths = [part["max_position_embeddings"] for part in parts if type(part.get("max_position_embeddings")) is int]
    return max(lengths, default=None)


def attention_heads(model: Mapping[str, Any]) -> int | None:
    """Returns how many attention heads the model of this config.json has; None if the file does not say so."""
    text = model.get("text_config")
    heads = (text if isinstance(text, Mapping) else model).get("num_attention_heads")
    return heads if type(heads) is int and heads > 0 else None


def _scales(rope: object) -> bool:
    """Returns whether the parameters of rotary positions, or those of one of their layers' types, have a factor."""
    if not isinstance(rope, Mapping):
        return False
    return rope.get("factor") is not None or any(_scales(part) for part in rope.values())
