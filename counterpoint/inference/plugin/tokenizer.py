"""The tokenizer of our servers: the one that the model's tokenizer.json describes.

Prompts are rendered, and completions are decoded for rewards, by tokenizer.json alone (`counterpoint/environments/chat.py`). vLLM
finds stop strings, calls and constrained tokens by transformers' `AutoTokenizer`, which builds the parts of some classes anew
(`tokenizer_class` in tokenizer_config.json, or the one that belongs to `model_type`), whatever tokenizer.json says: a byte-level
model named `LlamaTokenizerFast` has "Ġ" in its texts then. Our servers read it as we do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TokenizersBackend
from vllm.tokenizers.hf import CachedHfTokenizer, HfTokenizer, get_cached_tokenizer
from vllm.tokenizers.registry import TokenizerRegistry


class FileTokenizer(CachedHfTokenizer):
    """Takes the place of vLLM's reading by `AutoTokenizer`."""

    @classmethod
    def from_pretrained(cls, path_or_repo_id: str | Path, *args: Any, **kwargs: Any) -> HfTokenizer:
        """Returns the tokenizer of a directory's tokenizer.json; as vLLM does of one that has none."""
        if not (Path(path_or_repo_id) / "tokenizer.json").is_file():
            return CachedHfTokenizer.from_pretrained(path_or_repo_id, *args, **kwargs)
        for of_auto_tokenizer in ("config", "mistral_format", "trust_remote_code", "download_dir"):
            kwargs.pop(of_auto_tokenizer, None)
        tokenizer = TokenizersBackend.from_pretrained(path_or_repo_id, *args, **kwargs)
        tokenizer.clean_up_tokenization_spaces = False  # it would remove spaces that the model wrote
        return get_cached_tokenizer(tokenizer)


def read_by_file() -> None:
    """Has vLLM, in this process, read tokenizers by `FileTokenizer` where it would ask `AutoTokenizer`.

    What vLLM reads with code of its own, such as Mistral's tekken.json, stays.
    """
    replaced = (CachedHfTokenizer.__module__, CachedHfTokenizer.__name__)
    for mode, found in TokenizerRegistry.tokenizers.items():
        if found == replaced:
            TokenizerRegistry.tokenizers[mode] = (__name__, FileTokenizer.__name__)
