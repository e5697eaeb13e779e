"""Makes requests that a broken or hostile agent may send to the gateway, from a seed: of wrong keys, shapes, sizes and bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

REFUSED = frozenset({400, 401})
"""400 where the key cannot be in a header of HTTP."""
ENDED = frozenset({401, 410})

_VALID_CHAT: dict[str, Any] = {
    "model": "any",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    "max_tokens": 4,
    "stop": ["x"],
    "temperature": 0.5,
    "stream": False,
    "n": 1,
    "logprobs": True,
    "stream_options": None,
    "response_format": {"type": "text"},
    "seed": 1,
}
_VALID_COMPLETION: dict[str, Any] = {
    "model": "any",
    "prompt": "once",
    "max_tokens": 4,
    "stop": "x",
    "logprobs": 0,
    "n": 2,
}
_VALID_MESSAGE: dict[str, Any] = {
    "model": "any",
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": "x"},
                {"type": "text", "text": "well"},
                {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "2"}]}],
        },
    ],
    "tools": [{"name": "add", "description": "adds", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": False},
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "low"},
    "max_tokens": 4,
    "stop_sequences": ["x"],
    "metadata": {"user_id": "x"},
}
_VALID = {"chat/completions": _VALID_CHAT, "completions": _VALID_COMPLETION, "messages": _VALID_MESSAGE}

_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 17, 2**31, 2**63, 2**200, -0.0, 1e308, 0.5, "", "x", "user", "\0", "\x1b[2J", "é" * 300,
    "\U0001f600", "<|end|>", "<|assistant|>", "{{ 7 * 7 }}", "../../etc", [], {}, [[]], [None], [1, "x"], [1, 2, 300, -1],
    [[1], [2]], ["a", "b"], {"role": "user"}, {"role": "user", "content": "x"}, {"type": "function"},
    {"type": "json_schema", "json_schema": {}}, {"__class__": 1}, {"": ""}, "a" * 10_000, list(range(300)), "stop", "required",
)  # fmt: skip
_NAMES = (
    "messages", "tools", "prompt", "n", "stop", "stream", "stream_options", "max_tokens", "max_completion_tokens",
    "temperature", "top_p", "logprobs", "top_logprobs", "tool_choice", "response_format", "logit_bias", "role", "content",
    "reasoning_effort", "verbosity", "tool_calls", "tool_call_id", "function", "arguments", "name", "id", "type", "parameters",
    "unknown", "", "__proto__", "system", "input", "tool_use_id", "thinking", "input_schema", "stop_sequences", "output_config",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint of a session."""

    identity: str
    key: str


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """The bytes of one request."""

    kind: str
    content: bytes
    allowed: frozenset[int] | None = None
    """The only statuses of a right answer; None: any but 500."""
    reusable: bool = True
    """Whether it is one whole request of HTTP, after which the connection may go on."""


class HostileRequests:
    """A source of requests to `own`, with the secrets of `other` and `ended` rollouts at hand."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._kinds: tuple[tuple[int, Callable[[Target, Target, Target], HostileRequest]], ...] = (
            (3, self._valid),
            (8, self._mutated_fields),
            (4, self._mutated_bytes),
            (2, self._deep_or_wide),
            (3, self._wrong_key),
            (2, self._broken_http),
        )

    def next(self, own: Target, other: Target, ended: Target) -> HostileRequest:
        """The next request."""
        [make] = self._random.choices([make for _, make in self._kinds], [weight for weight, _ in self._kinds])
        return make(own, other, ended)

    def _valid(self, own: Target, other: Target, ended: Target) -> HostileRequest:
        path, fields = self._fields()
        fields["stream"] = self._random.random() < 0.3
        return HostileRequest("valid", _post(own, own.key, path, json.dumps(fields).encode()), frozenset({200, 403}))

    def _mutated_fields(self, own: Target, other: Target, ended: Target) -> HostileRequest:
        path, fields = self._fields()
        value: Any = fields
        for _ in range(self._random.randint(1, 4)):
            value = self._mutate(value)
        return HostileRequest("fields", _post(own, own.key, path, json.dumps(value).encode()))

    def _mutated_bytes(self, own: Target, other: Target, ended: Target) -> HostileRequest:
        path, fields = self._fields()
        body = bytearray(json.dumps(fields).encode())
        for _ in range(self._random.randint(1, 8)):
            place = self._random.randrange(len(body))
            action = self._random.randrange(3)
            if action == 0:
                body[place] = self._random.randrange(256)
            elif action == 1:
                del body[place : place + self._random.randint(1, 20)]
            else:
                body[place:place] = self._random.choice(
                    (b"{", b"[" * 50, b'"', b"\xff\xfe", b"\\ud800", b"1e999", b"NaN")
                )
            if not body:
                break
        return HostileRequest("bytes", _post(own, own.key, path, bytes(body)))

    def _deep_or_wide(self, own: Target, other: Target, ended: Target) -> HostileRequest:
        path, fields = self._fields()
        depth = self._random.choice((40, 70, 300, 1100, 20_000))
        choice = self._random.randrange(100)
        if choice == 0:
            body = b'{"messages": [' + b"{}," * 250_000 + b"{}]}"
        elif choice == 1:
            body = b" " * (4 * 2**20 + 1)
        elif choice < 20:
            fields = copy.deepcopy(_VALID_CHAT)
            arguments = "".join(
                ('{"a": ' * depth, self._random.choice(("1", "NaN", '"\\ud800"', "9" * 400)), "}" * depth)
            )
            fields["messages"][2]["tool_calls"][0]["function"]["arguments"] = arguments
            path, body = "chat/completions", json.dumps(fields).encode()
        elif choice < 50:
            name = self._random.choice([*fields])
            body = b'{"%b": ' % name.encode() + b"[" * depth + b"]" * depth + b"}"
        else:
            schema = b'{"a": ' * depth + b"1" + b"}" * depth
            tool = b'[{"type": "function", "function": {"name": "f", "parameters": %b}}]' % schema
            body = b'{"messages": [{"role": "user", "content": "x"}], "tools": %b}' % tool
        return HostileRequest("sizes", _post(own, own.key, path, body))

    def _wrong_key(self, own: Target, other: Target, ended: Target) -> HostileRequest:
        path, fields = self._fields()
        body = json.dumps(fields).encode()
        choice = self._random.randrange(7)
        if choice == 0:
            return HostileRequest("ended", _post(ended, ended.key, path, body), ENDED)
        target, key = (
            (own, other.key),
            (other, own.key),
            (Target("nobody", ""), own.key),
            (own, ""),
            (own, own.key[:-1]),
            (own, "".join(chr(self._random.randrange(33, 255)) for _ in range(self._random.randrange(200)))),
        )[choice - 1]
        return HostileRequest("keys", _post(target, key, path, body), REFUSED)

    def _broken_http(self, own: Target, other: Target, ended: Target) -> HostileRequest:
        path, fields = self._fields()
        body = json.dumps(fields).encode()
        whole = _post(own, own.key, path, body)
        head, _, _ = whole.partition(b"\r\n\r\n")
        chunked = head.rpartition(b"\r\nContent-Length")[0] + b"\r\nTransfer-Encoding: chunked"
        noise = self._random.randbytes(self._random.randint(1, 400))
        content = self._random.choice(
            (
                whole[: self._random.randrange(len(whole))],
                noise,
                b"GET / HTTP/1.1\r\n" + noise,
                whole.replace(b"HTTP/1.1", b"HTTP/9.9"),
                whole.replace(
                    b"POST", self._random.choice((b"GET", b"PUT", b"CONNECT", b"OPTIONS", b"HEAD", b"X" * 90))
                ),
                whole.replace(b"/v1", self._random.choice((b"/v2", b"/v1/../..", b"/%2e%2e", b"//", b"/v1" * 500))),
                head + b"\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n" + body,
                head + b"\r\nX: 1" * 300 + b"\r\n\r\n" + body,
                head + b"\r\nContent-Length: 5\r\n\r\n" + body,
                head + b"\r\nContent-Encoding: gzip\r\n\r\n" + body,
                head + b"\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n" + body,
                head.replace(b"Content-Length: ", b"Content-Length: -") + b"\r\n\r\n" + body,
                head.replace(b"Content-Length: ", b"Content-Length: 9999999999999999") + b"\r\n\r\n" + body,
                chunked + b"\r\n\r\nzz\r\n" + body,
                chunked + b"\r\n\r\nffffffffffffffff\r\n" + body,
                chunked + b"\r\n\r\n1\r\n{\r\n0\r\n\r\n" + whole,
                whole * 12,
                whole + noise,
            )
        )
        return HostileRequest("http", content, reusable=False)

    def _fields(self) -> tuple[str, dict[str, Any]]:
        path = self._random.choice(("chat/completions", "chat/completions", "messages", "completions"))
        return path, copy.deepcopy(_VALID[path])

    def _mutate(self, value: Any) -> Any:
        """The value with one change at a random place in it."""
        roll = self._random.random()
        if isinstance(value, dict) and value and roll < 0.85:
            name = self._random.choice([*value])
            if roll < 0.1:
                del value[name]
            elif roll < 0.25:
                value[self._random.choice(_NAMES)] = copy.deepcopy(self._random.choice(_VALUES))
            else:
                value[name] = self._mutate(value[name])
            return value
        if isinstance(value, list) and value and roll < 0.85:
            place = self._random.randrange(len(value))
            if roll < 0.15:
                value *= self._random.choice((0, 2, 40))
            else:
                value[place] = self._mutate(value[place])
            return value
        return copy.deepcopy(self._random.choice(_VALUES))


def _post(target: Target, key: str, path: str, body: bytes) -> bytes:
    authorization = f"Authorization: Bearer {key}\r\n".encode("latin-1") if key else b""
    return (
        f"POST /{target.identity}/v1/{path} HTTP/1.1\r\nHost: localhost\r\n".encode()
        + authorization
        + f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
