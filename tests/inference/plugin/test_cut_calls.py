"""A turn that was cut has the calls that were complete by then and no others, whatever vLLM's parser makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from counterpoint.inference.cut_calls import complete_calls, stands_whole
from tests.inference.plugin.cut_formats import CALLS, FORMATS

CLOSE_WHAT_IS_CUT = {
    "apertus", "deepseek_v32", "glm45", "granite", "kimi_k2", "minimax_m2", "mistral", "qwen3_coder", "qwen3_xml", "seed_oss",
    "step3p5",
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("cut")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_PLUGINS": ""}
    command = [sys.executable, "-m", "tests.inference.plugin.cut_formats", str(directory)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((directory / "answers.json").read_bytes())
    return found


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("name", FORMATS)
def test_wherever_a_turn_is_cut_its_calls_are_complete(name: str, answers: dict[str, Any]) -> None:
    whole, cut = answers[name]["whole"], answers[name]["cut"]
    assert [(each["name"], *json.loads(each["arguments"]).values()) for each in whole] == CALLS
    for text, answer in cut:
        assert answer["calls"] == whole[: len(answer["calls"])], text
        for called, path, only in CALLS[: len(answer["calls"])]:
            assert called in text
            assert only in text.partition(path)[2], text
    # Where the parser alone would call what was never asked for, the model is told of each call that is left out.
    wrong = [count for count, calls in enumerate(answers[name]["alone"]) if calls != whole[: len(calls)]]
    assert bool(wrong) == (name in CLOSE_WHAT_IS_CUT)
    assert all(cut[count][1]["malformed"] for count in wrong)
    assert max(len(answer["calls"]) for _, answer in cut) >= (1 if name == "step3p5" else 2)


def test_arguments_stand_whole_after_the_name() -> None:
    assert stands_whole('{"name": "f", "arguments": {"a": {"b": 1}}}', "f", '{"a": {"b": 1}}')
    assert stands_whole("f{} and on", "f", "{}")
    assert not stands_whole('{"name": "f", "arguments": {"a": {"b": 1}', "f", '{"a": {"b": 1}}')
    assert not stands_whole("{} f <path>", "f", "{}")
    assert not stands_whole("nothing", "f", "{}")
    assert not stands_whole('f {"a": 1}', "f", "no JSON")
    assert not stands_whole("f" + '{"a":' * 2_000, "f", '{"a": 1}')
    assert stands_whole('f{{{"a": 1}', "f", '{"a": 1}')
    assert not stands_whole("f" + "{" * 100_000 + '{"a": 1}', "f", '{"a": 1}'), "looked for without end"


def test_a_call_counts_that_the_parser_shows_at_once_and_not_piece_by_piece() -> None:
    first, last = ("f", '{"a": 1}'), ("g", '{"b": "xyz"}')

    def strict(count: int) -> list[tuple[str, str]]:
        return [first, last] if count >= 20 else [first] if count >= 10 else []

    def lenient(count: int) -> list[tuple[str, str]]:
        return [first, last] if count >= 20 else [first, ("g", '{"b": "x"}')] if count >= 12 else []

    assert complete_calls("", [first, last], 30, strict) == [first, last]
    assert complete_calls("", [first, last], 30, lenient) == [first]
    assert complete_calls("", [("f", "{}")], 30, lambda count: [("f", "{}")] if count > 3 else []) == []
    assert complete_calls("", [], 30, strict) == []
