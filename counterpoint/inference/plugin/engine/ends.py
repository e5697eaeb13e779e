"""Ends of constrained answers: each token that ends a turn of the model, as xgrammar takes them, not the tokenizer's one alone.

vLLM gives guidance the tokenizer's `eos_token`. Gemma's turns, for one, end with another token, which would then be forbidden: a
number would get more digits than the model meant, and each answer an end that it does not write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.structured_output.backend_guidance import GuidanceBackend


def end_as_the_model_does() -> None:
    """Has guidance, in this process, end answers with any of `ends_of`."""
    former = GuidanceBackend._build_ll_tokenizer

    def build(tokenizer: Any, vocab_size: int) -> Any:
        if is_mistral_tokenizer(tokenizer) or not (ends := ends_of(tokenizer, vocab_size)):
            return former(tokenizer, vocab_size)
        import llguidance.hf  # for the first constrained answer, as vLLM does

        return llguidance.hf.from_tokenizer(tokenizer, max(vocab_size, len(tokenizer)), eos_token=ends)

    GuidanceBackend._build_ll_tokenizer = staticmethod(build)


def ends_of(tokenizer: Any, vocab_size: int) -> list[int]:
    """Returns the tokens that end a turn, the tokenizer's first.

    They are those of `counterpoint/environments/chat.py`:`Chat.stop_token_ids`.
    """
    found = [tokenizer.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        path = Path(tokenizer.name_or_path) / name
        named = json.loads(path.read_bytes()).get("eos_token_id") if path.is_file() else None
        found += named if isinstance(named, list) else [named]
    return list(dict.fromkeys(each for each in found if isinstance(each, int) and 0 <= each < vocab_size))
