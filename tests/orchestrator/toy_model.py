"""A model directory without weights: a byte-level tokenizer and a chat template, all that the orchestrator reads."""

from __future__ import annotations

from pathlib import Path

import orjson
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{{ opening }}{% endif %}"
)


def make_toy_model(directory: Path) -> Path:
    """Writes the directory and answers it."""
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2}
    vocabulary |= {symbol: 3 + index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<pad>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"eos_token": "</s>", "pad_token": "<pad>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_bytes(orjson.dumps(settings))
    return directory
