"""Constrained answers end with any token that ends a turn of the model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.inference.plugin.tokenizer import FileTokenizer
from counterpoint.models.tiny_tokenizer import write_tokenizer

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", ".*torch.jit", DeprecationWarning)
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar

    from counterpoint.inference.plugin.engine.ends import end_as_the_model_does, ends_of

pytestmark = pytest.mark.slow

OTHER_END = 259
"""The token of `<|assistant|>`, by which turns of this model end, too."""


@pytest.mark.parametrize(("schema", "said"), [({"type": "integer"}, "42"), ({"type": "object"}, '{"a": 1}')])
@pytest.mark.parametrize("ends", [None, OTHER_END, [260, OTHER_END], [OTHER_END, 10**6]])
def test_each_end_of_a_turn_is_allowed_where_an_answer_may_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: object, schema: object, said: str
) -> None:
    import llguidance

    write_tokenizer(tmp_path, longest=512)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    monkeypatch.setattr(GuidanceBackend, "_build_ll_tokenizer", staticmethod(GuidanceBackend._build_ll_tokenizer))
    end_as_the_model_does()
    tokenizer, chat = FileTokenizer.from_pretrained(tmp_path), Chat(tmp_path)
    size = chat.vocabulary
    assert set(ends_of(tokenizer, size)) == {each for each in chat.stop_token_ids if each < size}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    built = GuidanceBackend._build_ll_tokenizer(tokenizer, size)
    for end in ends_of(tokenizer, size):
        matcher = llguidance.LLMatcher(built, grammar, log_level=0)
        constraint = GuidanceGrammar(matcher, built, size)
        first = matcher.compute_logit_bias()
        assert not any(first[each] for each in ends_of(tokenizer, size))
        assert constraint.accept_tokens("one", chat.encode(said))
        assert matcher.compute_logit_bias()[end]
        assert constraint.accept_tokens("one", [end])
        assert not matcher.is_error()
