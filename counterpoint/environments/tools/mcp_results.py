"""What a tool of an MCP server answers, as the text that a model reads: each thing once; what is no text by its name."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from counterpoint.transport.exact_json import JsonError, loads

_WRAPPED = {"result"}
"""The one key under which the SDK puts what a function returned that is no object."""
_OF_TEXT = ("text/", "application/json", "application/xml", "application/yaml")
"""How the types begin whose bytes are text: a server that reads files sends those as bytes, too."""


def text_of(result: Any) -> str:
    """Returns a `CallToolResult` as text: its blocks, a line each, then its structured content unless a block says that."""
    blocks = [_block(each) for each in result.content]
    structured = result.structured_content
    texts = [each.text for each in result.content if getattr(each, "type", "") == "text"]
    if structured is not None and not _is_said(structured, texts):
        blocks.append(json.dumps(structured, ensure_ascii=False))
    return "\n".join(blocks)


def _is_said(structured: Any, texts: list[str]) -> bool:
    """Whether the blocks of text say the structured content: as its JSON, or as the SDK writes what a function returned."""
    returned = structured["result"] if isinstance(structured, dict) and structured.keys() == _WRAPPED else structured
    items = returned if isinstance(returned, list) and len(returned) > 1 else [returned]
    return any(_says(text, structured) or _says(text, returned) for text in texts) or (
        len(items) == len(texts) and all(map(_says, texts, items))
    )


def _says(text: str, value: Any) -> bool:
    if isinstance(value, str) and text == value:
        return True
    try:
        # As JSON again, since Python's 1 is True.
        return _sorted(loads(text)) == _sorted(value)
    except JsonError:
        return False


def _sorted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def _block(block: Any) -> str:
    kind = str(getattr(block, "type", "content"))
    return _FORMS[kind](block) if kind in _FORMS else f"[{kind}, which is no text]"


def _media(block: Any) -> str:
    return f"[{block.type} ({block.mime_type}), which is no text]"


def _resource(block: Any) -> str:
    held = block.resource
    if (text := getattr(held, "text", None)) is None and (held.mime_type or "").startswith(_OF_TEXT):
        with suppress(ValueError):  # no base64, or no UTF-8
            text = b64decode(held.blob, validate=True).decode()
    if text is not None:
        return f"[resource {held.uri}]\n{text}"
    return f"[resource {held.uri} ({held.mime_type or 'bytes'}), which is no text]"


def _link(block: Any) -> str:
    said = (block.title or block.name, block.mime_type and f"({block.mime_type})", block.description)
    return f"[link to {block.uri}: {' '.join(filter(None, said))}]"


_FORMS: dict[str, Callable[[Any], str]] = {
    "text": lambda block: str(block.text),
    "image": _media,
    "audio": _media,
    "resource": _resource,
    "resource_link": _link,
}
