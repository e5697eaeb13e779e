"""What a model's config.json says: the answers that it can give, and how it can be served.

The pool compares each answer of a server with the former. A server is not asked for them: one that serves another model would
tell that model's. The latter is read before vLLM starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a model's configuration that hold the number of experts."""


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """What a model can answer. None: unknown, and not compared."""

    vocabulary: int | None = None
    """The number of token ids."""
    experts: int | None = None
    routing: tuple[int, int] | None = None
    """Layers and top_k of routed experts."""


UNBOUNDED = AnswerBounds()
"""The bounds of a model of which nothing is known."""


def read_bounds(model: Path, vocabulary: int | None = None) -> AnswerBounds:
    """Returns the bounds that the config.json in a model's directory gives; none where there is no such file.

    `vocabulary` is taken where the file has no `vocab_size`. Raises `ValueError`, naming the file, if it is no JSON object.
    """
    path = model / "config.json"
    try:
        config = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        return AnswerBounds(vocabulary)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a JSON {type(config).__name__}; expected an object")
    text = config.get("text_config")
    parts = [text, config] if isinstance(text, dict) else [config]
    layers, top_k = _first(parts, "num_hidden_layers"), _first(parts, "num_experts_per_tok")
    return AnswerBounds(
        vocabulary=_first(parts, "vocab_size") or vocabulary,
        experts=next((count for name in EXPERT_COUNTS if (count := _first(parts, name))), None),
        routing=None if layers is None or top_k is None else (layers, top_k),
    )


def _first(parts: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """Returns the first positive integer under `key`."""
    return next((count for part in parts if type(count := part.get(key)) is int and count > 0), None)


def longest_context(model: Mapping[str, Any]) -> int | None:
    """Returns the most tokens that vLLM 0.32 lets the model of this config.json have; None if the file alone does not say so.

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


def has_other_parts(model: Mapping[str, Any]) -> bool:
    """Returns whether the model of this config.json has parts for more than text, such as images."""
    return isinstance(model.get("text_config"), Mapping)


def text_part(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns what this config.json says of the part that computes text."""
    text = model.get("text_config")
    return text if isinstance(text, Mapping) else model


def attention_heads(model: Mapping[str, Any]) -> int | None:
    """Returns how many attention heads the model of this config.json has; None if the file does not say so."""
    heads = text_part(model).get("num_attention_heads")
    return heads if type(heads) is int and heads > 0 else None


def head_size(model: Mapping[str, Any]) -> int | None:
    """Returns the dimensions of an attention head of the model of this config.json; None if it has heads of another kind."""
    hidden, heads = _first([model], "hidden_size"), _first([model], "num_attention_heads")
    if model.get("model_type") not in FULL_ATTENTION or hidden is None or heads is None:
        return None
    return _first([model], "head_dim") or hidden // heads


FULL_ATTENTION = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Kinds of models whose layers all keep the keys and values of all tokens, unless their configuration says otherwise."""


def kept_bytes(model: Mapping[str, Any]) -> int | None:
    """Returns the bytes of a token's keys and values in float32, the widest type; None if the model keeps something else, too."""
    layers, hidden, heads = (
        _first([model], key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    windowed = model.get("use_sliding_window") or set(model.get("layer_types") or ()) - {"full_attention"}
    if model.get("model_type") not in FULL_ATTENTION or windowed or layers is None or hidden is None or heads is None:
        return None
    width = (_first([model], "num_key_value_heads") or heads) * (_first([model], "head_dim") or -(-hidden // heads))
    return layers * 2 * width * 4


def _scales(rope: object) -> bool:
    """Returns whether the parameters of rotary positions, or those of one of their layers' types, have a factor."""
    if not isinstance(rope, Mapping):
        return False
    return rope.get("factor") is not None or any(_scales(part) for part in rope.values())
