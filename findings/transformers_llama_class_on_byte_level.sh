#!/bin/bash
# transformers 5.19.0: AutoTokenizer builds the pre-tokenizer and the decoder anew for some values of tokenizer_class.
#
# Input: a model directory as byte-level models have it (tokenizer.json: byte-level BPE), whose tokenizer_config.json names
# "LlamaTokenizerFast" and whose config.json has model_type llama.
# Expected: the text that tokenizer.json gives, by the library `tokenizers` itself: "The answer is 42".
# Seen: "TheĠanswerĠisĠ42". With "PreTrainedTokenizerFast" it is right.
# Exit code: 0 while it is so, 1 once it has changed.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT; cd "$dir"
python3 -m venv venv
venv/bin/pip install -qq transformers==5.19.0 tokenizers==0.23.3
cat > check.py <<'PY'
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, __version__

made = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
made.decoder = decoders.ByteLevel()
ids = made.encode("The answer is 42").ids
texts = {"tokenizers": made.decode(ids)}
for name in ("PreTrainedTokenizerFast", "LlamaTokenizerFast"):
    directory = Path(name)
    directory.mkdir()
    made.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    texts[name] = AutoTokenizer.from_pretrained(directory).decode(ids)
print("transformers", __version__)
print("expected:", repr(texts["tokenizers"]))
for name, text in texts.items():
    print(f"seen with {name}: {text!r}")
same = texts["PreTrainedTokenizerFast"] == texts["tokenizers"]
raise SystemExit(0 if same and texts["LlamaTokenizerFast"] == "TheĠanswerĠisĠ42" else 1)
PY
venv/bin/python check.py
