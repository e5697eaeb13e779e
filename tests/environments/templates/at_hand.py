"""The chat templates that installed packages ship: TRL's of some thirty families of models, vLLM's, and Mistral's."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from tokenizers import AddedToken

from counterpoint.models.tiny_tokenizer import write_tokenizer


def _directory(package: str, *parts: str) -> Path:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent.joinpath(*parts)


def _mistral() -> dict[str, str]:
    found = {}
    for version in TokenizerVersion:
        for spm in (False, True) if version < TokenizerVersion.v11 else (False,):
            effort = ("none", "high") if version >= TokenizerVersion.v15 else None
            config = TemplateConfig(
                version,
                spm,
                use_special_token_variables=True,
                reasoning_effort_values=effort,
                reasoning_effort_default="none" if effort else None,
            )
            found[f"mistral_common/{version}{'_spm' if spm else ''}"] = build_chat_template(config)
    return found


TEMPLATES = {
    f"{package}/{path.stem}": path.read_text(encoding="utf-8")
    for package, parts in (("trl", ("chat_templates",)), ("vllm", ("transformers_utils", "chat_templates")))
    for path in sorted(_directory(package, *parts).glob("*.jinja"))
} | _mistral()

ENDS = {
    "<|im_end|>": ("<|im_end|>",),
    "<|eom_id|>": ("<|eot_id|>", "<|eom_id|>"),
    "<|eot_id|>": ("<|eot_id|>",),
    "<turn|>": ("<turn|>", "<|tool_response>"),
    "<|return|>": ("<|return|>", "<|call|>"),
    "<|observation|>": ("<|user|>", "<|observation|>"),
    "<|eom|>": ("<|eot|>",),
}
"""The tokens that end turns, as the models' generation configs name them, by a token that only their templates have."""

_TOKEN = re.compile(r"<\|\w+\|?>|<\w+\|>|\[/?[A-Z_]+\]")


def ends_of(name: str) -> tuple[str, ...]:
    """Returns the tokens that end a turn of the template's models; those of a tokenizer without any are its own."""
    return next((ends for token, ends in ENDS.items() if token in TEMPLATES[name]), ("<|end|>",))


def model_directory(directory: Path, name: str, *, own_tokens: bool = False) -> Path:
    """Makes a directory with a tokenizer of bytes and the template.

    `own_tokens`: with the template's special tokens, and the ends of turns that its models have.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(directory, longest=1 << 20)
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": "<|system|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    if own_tokens:
        named = sorted({*_TOKEN.findall(TEMPLATES[name]), *ends_of(name)})
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in named])
        tokenizer.save(str(directory / "tokenizer.json"))
        ends = [tokenizer.token_to_id(token) for token in ends_of(name)]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return directory
