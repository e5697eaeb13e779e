"""The chat templates of a model directory, compiled and sandboxed, with the functions that transformers gives to templates.

A directory has one template, or several by name: `default`, and with some models `tool_use` for conversations with tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import CallBlock, Const, Getattr, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_ALWAYS_GIVEN: Mapping[str, Any] = {"tools": None, "documents": None}
"""Variables that transformers and vLLM define for every template, which may ask whether they are none."""

_DIRECTORY = "additional_chat_templates"
"""The folder where transformers saves the templates that are not the default."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """One compiled template."""

    compiled: Template
    variables: frozenset[str]
    """The variables that it reads and does not set."""
    names: frozenset[str]
    """The names and texts in it. A field that is not among them cannot be read by its name."""
    reads_clock: bool

    def render(self, variables: Mapping[str, Any]) -> str:
        """Returns the text. Raises `jinja2.TemplateError`, also when the template refuses."""
        return self.compiled.render({**_ALWAYS_GIVEN, **variables})


class ChatTemplates:
    """The templates of one model directory."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Reads them; `settings` is what `tokenizer_config.json` holds. Raises `ValueError` that names the invalid file."""
        sources = _sources(directory, settings)
        if "default" not in sources:
            others = f"; there are {', '.join(sorted(sources))}, and none is named 'default'" if sources else ""
            raise ValueError(
                f"{directory} has no chat template: expected chat_template.jinja, or chat_template in "
                f"tokenizer_config.json{others}"
            )
        self._by_name = {name: _compile(*sources[name]) for name in ("default", "tool_use") if name in sources}

    def of(self, tools: object) -> ChatTemplate:
        """Returns the template for a conversation that has `tools`, or none if they are empty."""
        return self._by_name.get("tool_use" if tools else "default", self._by_name["default"])

    @property
    def variables(self) -> frozenset[str]:
        """The variables that any of them reads."""
        return frozenset().union(*(each.variables for each in self._by_name.values()))


def _sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, tuple[Path, str]]:
    """Returns file and text of each template by name. Files go before what `tokenizer_config.json` holds, as in transformers."""
    files = {path.stem: path for path in sorted((directory / _DIRECTORY).glob("*.jinja"))}
    if (path := directory / "chat_template.jinja").is_file():
        files["default"] = path
    if files:
        return {name: (path, path.read_text(encoding="utf-8")) for name, path in files.items()}
    match settings.get("chat_template"):
        case str(source):
            named: Iterable[tuple[object, object]] = [("default", source)]
        case dict(sources):
            named = sources.items()
        case list(entries):
            named = [(each.get("name"), each.get("template")) for each in entries if isinstance(each, dict)]
        case _:
            named = []
    config = directory / "tokenizer_config.json"
    return {name: (config, text) for name, text in named if isinstance(name, str) and isinstance(text, str)}


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, by which some templates mark the assistant's text, and renders its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        """Returns the tag's content as a block of its own, as in transformers: what is set in it ends with it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_rendered"), [], [], body).set_lineno(line)

    def _rendered(self, caller: Callable[[], str]) -> str:
        return caller()


def _compile(file: Path, source: str) -> ChatTemplate:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        tree = environment.parse(source)
        names = {each.attr for each in tree.find_all(Getattr)} | {str(each.value) for each in tree.find_all(Const)}
        variables = frozenset(find_undeclared_variables(tree))
        return ChatTemplate(environment.from_string(source), variables, frozenset(names), "strftime_now" in source)
    except TemplateError as error:
        raise ValueError(f"{file}: the chat template does not compile: {error}") from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model has seen. The parameters have transformers' order.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
