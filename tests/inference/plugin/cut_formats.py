"""Parses every beginning of a text with two calls, as vLLM's parsers read it: a program of its own, since it imports vLLM.

Its argument is a directory. It writes `answers.json` there: of each parser, the calls of the whole text, and of each beginning
its text and the answer of `parse_worker`.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Tokenizer

from counterpoint.inference.plugin import parse_worker
from counterpoint.inference.plugin.parse_worker import TextParser
from counterpoint.models.tiny_tokenizer import write_tokenizer

XML = "<function={name}>\n<parameter=path>\n{path}\n</parameter>\n<parameter=only>\n{only}\n</parameter>\n</function>"
JSON = '{{"name": "{name}", "arguments": {{"path": "{path}", "only": "{only}"}}}}'
ARGUMENTS = '{{"path": "{path}", "only": "{only}"}}'
GLM = "<arg_key>path</arg_key><arg_value>{path}</arg_value><arg_key>only</arg_key><arg_value>{only}</arg_value>"
DEEPSEEK = (
    '<@DSML@invoke name="{name}">\n<@DSML@parameter name="path" string="true">{path}</@DSML@parameter>\n'
    '<@DSML@parameter name="only" string="true">{only}</@DSML@parameter>\n</@DSML@invoke>'
)
MINIMAX = (
    '<invoke name="{name}">\n<parameter name="path">{path}</parameter>\n'
    '<parameter name="only">{only}</parameter>\n</invoke>'
)

# Of each parser: how a call is written, what stands before, between and after calls, and its special tokens. An @ stands for
# the wide bar of DeepSeek's marks.
FORMATS = {
    "qwen3_coder": (f"<tool_call>\n{XML}\n</tool_call>", "", "\n", "", ["<tool_call>", "</tool_call>"]),
    "qwen3_xml": (f"<tool_call>\n{XML}\n</tool_call>", "", "\n", "", ["<tool_call>", "</tool_call>"]),
    "step3p5": (f"<tool_call>\n{XML}\n</tool_call>", "", "\n", "", []),
    "seed_oss": (
        f"<seed:tool_call>\n{XML}\n</seed:tool_call>", "", "\n", "", ["<seed:tool_call>", "</seed:tool_call>"],
    ),
    "glm45": ("<tool_call>{name}" + GLM + "</tool_call>", "", "\n", "", ["<tool_call>", "</tool_call>"]),
    "minimax_m2": (MINIMAX, "<minimax:tool_call>", "\n", "</minimax:tool_call>", ["<minimax:tool_call>", "</minimax:tool_call>"]),
    "deepseek_v32": (DEEPSEEK, "<@DSML@function_calls>\n", "\n", "\n</@DSML@function_calls>", []),
    "hermes": (f"<tool_call>\n{JSON}\n</tool_call>", "", "\n", "", []),
    "llama3_json": (JSON, "", "; ", "", ["<|python_tag|>"]),
    "mistral": ("[TOOL_CALLS]{name}[ARGS]" + ARGUMENTS, "", "", "", ["[TOOL_CALLS]", "[ARGS]"]),
    "kimi_k2": (
        "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>" + ARGUMENTS + "<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>",
        ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|tool_calls_section_begin|>",
         "<|tool_calls_section_end|>"],
    ),
    "deepseek_v31": (
        "<@tool▁call▁begin@>{name}<@tool▁sep@>" + ARGUMENTS + "<@tool▁call▁end@>",
        "<@tool▁calls▁begin@>", "", "<@tool▁calls▁end@>", ["<@tool▁calls▁begin@>", "<@tool▁calls▁end@>"],
    ),
    "apertus": ('{{"{name}": ' + ARGUMENTS + "}}", "<|tools_prefix|>[", ", ", "]<|tools_suffix|>", []),
    "granite": (JSON, "<|tool_call|>[", ", ", "]", ["<|tool_call|>"]),
    "pythonic": ('{name}(path="{path}", only="{only}")', "[", ", ", "]", []),
    "lfm2": (
        '{name}(path="{path}", only="{only}")', "<|tool_call_start|>[", ", ", "]<|tool_call_end|>",
        ["<|tool_call_start|>", "<|tool_call_end|>"],
    ),
}  # fmt: skip

TEXT = {"type": "string"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {"path": TEXT, "only": TEXT}}},
    }
    for name in ("remove", "keep")
]
CALLS = [("remove", "work", "*.tmp"), ("keep", "home", "a b")]


def parser_of(name: str, directory: Path, tokens: list[str]) -> TextParser:
    """Returns the parser, with a tokenizer of bytes and of its own special tokens."""
    directory.mkdir()
    write_tokenizer(directory, 4096)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tokenizer.save(str(directory / "tokenizer.json"))
    return TextParser(
        {
            "tokenizer": str(directory),
            "tokenizer_mode": "auto",
            "trust_remote_code": False,
            "revision": None,
            "tool_parser": name,
            "reasoning_parser": None,
            "tool_parser_plugin": "",
            "reasoning_parser_plugin": "",
            "harmony": False,
        }
    )


def answers(name: str, directory: Path) -> dict[str, Any]:
    """Returns what is written of one parser."""
    written, before, between, after = (text.replace("@", "\uff5c") for text in FORMATS[name][:4])
    parser = parser_of(name, directory / name, [token.replace("@", "\uff5c") for token in FORMATS[name][4]])
    texts = [written.format(name=name, path=path, only=only) for name, path, only in CALLS]
    ids = parser._tokenizer.encode(before + between.join(texts) + after + "And then", add_special_tokens=False)

    def parse(count: int, *, cut: bool) -> dict[str, Any]:
        return parser.parse({"token_ids": ids[:count], "tools": TOOLS, "template_kwargs": {}, "cut": cut})

    end = len(ids) - len("And then")
    return {
        "whole": parse(end, cut=False)["calls"],
        "cut": [[parser._text(ids[:count]), parse(count, cut=True)] for count in range(1, len(ids) + 1)],
        "alone": [parse(count, cut=False)["calls"] for count in range(1, end)],
    }


if __name__ == "__main__":
    signal.signal(signal.SIGVTALRM, parse_worker._on_alarm)
    here = Path(sys.argv[1])
    (here / "answers.json").write_bytes(orjson.dumps({name: answers(name, here) for name in FORMATS}))
