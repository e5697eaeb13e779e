"""The same conversation has the same tokens, whoever wrote it: JSONL, Parquet, `datasets`, or a client of the gateway."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import orjson
import pytest

from counterpoint.environments.chat import Chat, Message, Tool
from counterpoint.environments.data.load import load_rows
from counterpoint.environments.demonstrations import demonstrations_of
from counterpoint.environments.gateway.requests import chat_request
from counterpoint.environments.sampling import SamplingConfig
from counterpoint.trainer.sft.batches import SftBatches, conversation_in
from counterpoint.trainer.sft.config import SftConfig
from tests.environments.templates.at_hand import TEMPLATES, model_directory

pytestmark = pytest.mark.slow

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"much": {"type": "number", "description": "How much."}}},
    },
}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    result = {"role": "tool", "tool_call_id": "call00001", "name": name, "content": "seen"}
    answer = {"role": "assistant", "content": None, "tool_calls": [call(name, arguments)]}
    messages = [{"role": "user", "content": "go"}, answer, result, {"role": "assistant", "content": "done"}]
    return {"messages": messages, "tools": [LOOK, ADD]}


ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
    {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "ho", "reasoning_content": "hm"},
        ]
    },
    calling("look", {"place": 'a "b" é'}),
    calling("add", {"much": 2.5}),
]


def with_arguments_as_text(row: dict[str, Any]) -> dict[str, Any]:
    """As OpenAI's API writes calls."""
    changed: dict[str, Any] = json.loads(json.dumps(row))
    for message in changed["messages"]:
        for each in message.get("tool_calls", ()):
            each["function"]["arguments"] = json.dumps(each["function"]["arguments"], indent=1)
    return changed


def with_text(row: dict[str, Any]) -> dict[str, Any]:
    """As datasets write what has no common schema: tools as one text."""
    return {**row, "tools": json.dumps(row["tools"]) if "tools" in row else None}


def with_columns_of_text(row: dict[str, Any]) -> dict[str, Any]:
    """With text also where there are no tools, or no calls."""
    messages = [
        {**each, "tool_calls": json.dumps(each["tool_calls"]) if "tool_calls" in each else ""}
        for each in row["messages"]
    ]
    return {"messages": messages, "tools": json.dumps(row.get("tools"))}


def bare(row: dict[str, Any]) -> dict[str, Any]:
    """With definitions and calls that lack their wrapping."""
    changed: dict[str, Any] = json.loads(json.dumps(row))
    for message in changed["messages"]:
        if "tool_calls" in message:
            message["tool_calls"] = [{"id": each["id"], **each["function"]} for each in message["tool_calls"]]
    return changed | ({"tools": [tool["function"] for tool in row["tools"]]} if "tools" in row else {})


WRITTEN = {
    "objects": ROWS,
    "arguments as text": [with_arguments_as_text(row) for row in ROWS],
    "tools as text": [with_text(row) for row in ROWS],
    "columns of text": [with_columns_of_text(row) for row in ROWS],
    "bare": [bare(row) for row in ROWS],
}


CANNOT_BE_TRAINED = {
    "trl/deepseek_r1_distill", "trl/deepseek_r1_distill_training", "trl/deepseekv3", "trl/deepseekv3_training",
    "trl/idefics3", "trl/idefics3_training", "trl/llava_next", "trl/llava_next_training", "trl/smolvlm", "trl/smolvlm_training",
    "vllm/template_kimi_audio",
}  # fmt: skip
"""They let the assistant write after other text than they put before its messages, or drop content that is text."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The `data` of each way in which the rows are kept."""
    import datasets
    import pyarrow
    import pyarrow.parquet

    directory, found = tmp_path_factory.mktemp("rows"), dict[str, dict[str, Any]]()
    for number, (name, rows) in enumerate(WRITTEN.items()):
        lines, table, saved = (directory / f"{number}{suffix}" for suffix in (".jsonl", ".parquet", ""))
        lines.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        columns = [{"tools": None, **row} for row in rows]  # of the first row, for both
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(columns), table)
        datasets.Dataset.from_list(columns).save_to_disk(str(saved))
        found |= {f"{name}, JSONL": {"path": str(lines)}, f"{name}, Parquet": {"path": str(table)}}
        found |= {f"{name}, datasets": {"dataset": str(saved)}, f"{name}, rows": {"rows": rows}}
    return found


def at_the_gateway(number: int) -> tuple[list[Message], list[Tool]]:
    """What the gateway makes of a row, as its client sends it."""
    row = WRITTEN["arguments as text"][number]
    request = chat_request({"tools": None, **row}, SamplingConfig(), cast(Chat, None), agent_sampling=False)
    return request.messages, request.tools


def test_a_row_is_the_same_conversation_however_it_is_written(sources: dict[str, dict[str, Any]]) -> None:
    for number in range(len(ROWS)):
        expected = json.dumps(at_the_gateway(number))  # as text, since the order of keys makes other tokens, too
        for source, data in sources.items():
            assert json.dumps(conversation_in(load_rows(data)[number])[:2]) == expected, (number, source)


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_template_gives_a_row_and_a_request_the_same_tokens(name: str, tmp_path: Path) -> None:
    model = model_directory(tmp_path, name)
    chat, usable = Chat(model), list[int]()
    for number in range(len(ROWS)):
        with suppress(ValueError):  # a template may refuse tools, say
            demonstrations_of(chat, *at_the_gateway(number))
            usable.append(number)
    assert bool(usable) == (name not in CANNOT_BE_TRAINED)
    rows = [each[number] for each in WRITTEN.values() for number in usable or [0]]
    config = {
        "output_dir": tmp_path / "out",
        "model": str(model),
        "data": {"rows": rows},
        "samples_per_step": len(rows),
    }
    settings = SftConfig.model_validate(config | {"trainer": {"max_tokens": 1 << 20}})
    if not usable:
        with pytest.raises(ValueError, match="chat template"):
            SftBatches(settings)
        return
    batch = SftBatches(settings).batch(1)
    found: dict[int, list[tuple[list[int], list[bool]]]] = {}
    for index, sample in enumerate(batch.samples):
        part = slice(batch.sample_offsets[index], batch.sample_offsets[index + 1])
        tokens, mask = batch.token_ids_T[part].tolist(), batch.loss_mask_T[part].astype(bool).tolist()
        found.setdefault(int(sample.rollout_id.split("-")[1]), []).append((tokens, mask))
    for index in range(len(rows)):
        expected = demonstrations_of(chat, *at_the_gateway(usable[index % len(usable)]))
        assert found[index] == [(each.token_ids, each.trained) for each in expected]
