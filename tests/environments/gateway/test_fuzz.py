"""Hostile requests in small: what `python -m perf.fuzz` sends a million of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.gateway.errors import GatewayRefused
from counterpoint.environments.gateway.json_body import MOST_VALUES, parse_body
from counterpoint.environments.gateway.messages import template_messages
from counterpoint.environments.messages import MOST_DEPTH, is_deep
from perf.fuzz.__main__ import fuzz, make_chat


@pytest.mark.slow
async def test_hostile_requests_are_refused_and_crash_nothing(tmp_path: Path) -> None:
    findings = await fuzz(1500, 7, make_chat(tmp_path))
    assert not findings.faults
    assert not findings.wrong
    assert sum(findings.kinds.values()) == 1500
    assert findings.turns > 100
    assert {200, 400, 401, 413} <= {*findings.statuses}


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_depth_is_counted_without_recursion(opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    for depth in (MOST_DEPTH - 1, MOST_DEPTH, 500):
        body = f'{{"x": {opening * depth}{"1" if opening != "[" else ""}{closing * depth}}}'.encode()
        if depth < MOST_DEPTH:
            assert not is_deep(parse_body(body))
        else:
            with pytest.raises(GatewayRefused, match="deep"):
                parse_body(body)


def test_values_are_counted_outside_of_text() -> None:
    text = "[{,\\\\" * (MOST_VALUES // 2)
    assert parse_body(b'{"x": "%b", "y": [1, 2]}' % text.encode())["y"] == [1, 2]
    with pytest.raises(GatewayRefused, match="at most"):
        parse_body(b'{"x": [%b0]}' % (b"0," * MOST_VALUES))
    for open_text in (b'"' + b"[" * (MOST_VALUES + 1), b'"' + b"\\," * (MOST_VALUES + 1) + b"\\"):
        with pytest.raises(GatewayRefused, match="not JSON"):
            parse_body(open_text)


def test_long_integers_are_counted_outside_of_text() -> None:
    long = b"9" * 4000
    within, beyond = [b",".join([long] * count) for count in (5, 6)]
    assert parse_body(b'{"x": "%b", "y": [%b]}' % (long * 20, within))["y"] == [int(long)] * 5
    for numbers in (beyond, b"[%b]" % b",".join([b"9" * 20] * 1001)):
        with pytest.raises(GatewayRefused, match="digits of long integers") as refused:
            parse_body(b'{"x": "\\"%b", "y": [%b]}' % (long, numbers))
        assert refused.value.status == 413

    def asked(arguments: str, count: int) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}] * count

    assert len(template_messages(asked(f'{{"a": {2**70}, "b": "{10**100}"}}', 900))) == 900
    with pytest.raises(GatewayRefused, match="digits of long integers"):
        template_messages(asked(f'{{"a": {2**70}}}', 1001))
    decimals = ", ".join(["0.00012345678901234567", "-1.00000000000000000000005e-7"] * 1500)
    assert len(parse_body(f'{{"shares": [{decimals}]}}'.encode())["shares"]) == 3000
    assert template_messages(asked(f'{{"shares": [{decimals}]}}', 1))


def test_values_within_the_arguments_of_calls_are_counted_over_all_of_them() -> None:
    def asked(*arguments: str) -> list[dict[str, Any]]:
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": each}} for each in arguments]
        return [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]

    text, half = '{"a": "%s"}' % ("[," * MOST_VALUES), '{"a": [%s0]}' % ("0," * (MOST_VALUES // 2 - 3))
    assert len(template_messages(asked(text, half, half))) == 3
    with pytest.raises(GatewayRefused, match="the arguments of its calls have about") as refused:
        template_messages(asked(half, half, half))
    assert refused.value.status == 413
