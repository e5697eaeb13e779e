"""The tokenizer of the built-in models: one token a byte, five special tokens, and a minimal chat template.

Its files are those of any model (`tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`), so transformers, vLLM and
`environments.chat` load it like any other. `build.py` writes it beside the weights.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

PADDING = "<|endoftext|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (PADDING, "<|system|>", "<|user|>", "<|assistant|>", END_OF_TURN)

# One token opens a message and one ends it, so that sequences stay short on a CPU. Tools are written as Hermes writes them, which
# vLLM's parser of that name reads, in plain text: a token more would be another model.
CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|system|>' + (messages[0]['content'] if messages[0]['role'] == 'system' else '') }}"
    "{% for tool in tools %}"
    "{{ '<tool>' + tool['function']['name'] + '(' }}"
    "{{ ((tool['function']['parameters'] or {})['properties'] or {})|join(', ') + ')</tool>' }}"
    "{% endfor %}{{ '<|end|>' }}"
    "{% endif %}"
    "{% for message in (messages[1:] if tools and messages[0]['role'] == 'system' else messages) %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|><tool_response>' + message['content'] + '</tool_response><|end|>' }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>{\"name\": ' + call['function']['name']|tojson + ', \"arguments\": ' }}"
    "{{ call['function']['arguments'] if call['function']['arguments'] is string else call['function']['arguments']|tojson }}"
    "{{ '}</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|end|>' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def write_tokenizer(directory: Path, longest: int) -> Tokenizer:
    """Writes the tokenizer's files into an existing directory, and returns the tokenizer.

    Ids 0 to 255 are bytes (in the byte-level alphabet's order), followed by `SPECIAL_TOKENS`. `longest` is the model's context,
    in tokens.
    """
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
        "pad_token": PADDING,
        "eos_token": END_OF_TURN,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return tokenizer
