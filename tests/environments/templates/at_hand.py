"""The chat templates that installed packages ship: TRL's of some thirty families of models, and vLLM's."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from models.tiny_tokenizer import write_tokenizer


def _directory(package: str, *parts: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent.joinpath(*parts)


TEMPLATES = {
    f"{package}/{path.stem}": path
    for package, parts in (("trl", ("chat_templates",)), ("vllm", ("transformers_utils", "chat_templates")))
    for path in sorted(_directory(package, *parts).glob("*.jinja"))
}


def model_directory(directory: Path, name: str) -> Path:
    """Makes a directory with a tokenizer of bytes and the template."""
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory, longest=1 << 20)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|system|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATES[name].read_text(encoding="utf-8"), encoding="utf-8")
    return directory
