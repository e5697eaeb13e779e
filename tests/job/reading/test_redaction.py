"""What others may see of a configuration."""

from __future__ import annotations

import json

import pytest

from counterpoint.job.reading.redaction import HIDDEN, LONGEST_TEXT, redact, redact_line
from tests.support.growth import assert_growth


def test_secrets_are_left_out() -> None:
    given = {
        "model": "tiny",
        "max_tokens": 64,
        "tokenizer": "t",
        "key_file": "keys/one",
        "api_key": "abc",
        "apiKey": "abc",
        "OPENAIKEY": "abc",
        "PGPASSWORD": "abc",
        "passphrase": 1234,
        "nested": [{"headers": {"x": "y"}, "url": "https://me:pw@host:1/path?sig=1&page=2"}],
        "command": ["tool", "--token", "abc", "--steps", "3", "--api-key=abc"],
        "text": "sk-abcdefgh12345678",
        "basic": "basic mathematics",
        "empty_key": "",
    }
    assert redact(given) == {
        "model": "tiny",
        "max_tokens": 64,
        "tokenizer": "t",
        "key_file": "keys/one",
        "api_key": HIDDEN,
        "apiKey": HIDDEN,
        "OPENAIKEY": HIDDEN,
        "PGPASSWORD": HIDDEN,
        "passphrase": HIDDEN,
        "nested": [{"headers": {"x": HIDDEN}, "url": f"https://{HIDDEN}@host:1/path?sig={HIDDEN}&page=2"}],
        "command": ["tool", "--token", HIDDEN, "--steps", "3", f"--api-key={HIDDEN}"],
        "text": HIDDEN,
        "basic": "basic mathematics",
        "empty_key": "",
    }


@pytest.mark.parametrize(
    "text",
    [
        "https://user:a@PLAIN@host/",
        "https://user:a/PLAIN@host/",
        "see http://PLAIN@host, please",
        "Authorization: Bearer PLAIN",
        "http://host/#access_token=PLAIN",
        "http://host/?X-Amz-Signature=PLAIN",
    ],
)
def test_no_part_of_a_secret_in_a_text_is_left(text: str) -> None:
    assert "PLAIN" not in json.dumps(redact({"text": text, "list": [text]}))


@pytest.mark.parametrize(
    "line",
    [
        "WANDB_API_KEY: PLAIN0123456789",
        "AWS_SECRET_ACCESS_KEY=PLAIN/K7MDENG/bPxRf",
        '{"api_key": "PLAIN-AbCdEf", "x": 1}',
        "non-default args: {'api_key': ['PLAIN012345'], 'port': 8000}",
        "password = PLAINhunter2",
        "X-Api-Key: PLAINabcdef",
        "GET http://127.0.0.1/?token=PLAIN012345",
        "token=PLAIN0123456",
    ],
)
def test_a_line_of_a_log_has_no_value_of_a_secret_name(line: str) -> None:
    assert "PLAIN" not in redact_line(line)
    assert HIDDEN in redact_line(line)


@pytest.mark.parametrize(
    "line",
    [
        "step 3: 1200 tokens, max_tokens=256, eos_token: 151645, eos_token: <|im_end|>",
        "api_key_file = /run/keys/one.txt; tokenizer: /models/tiny",
        "key 'orchestrator.steps': expected a number",
    ],
)
def test_a_line_of_a_log_keeps_what_is_no_secret(line: str) -> None:
    assert redact_line(line) == line


@pytest.mark.parametrize("unit", ["a", "_", "-", "a-", "A_"])
def test_a_hostile_line_takes_time_that_grows_with_its_length(unit: str) -> None:
    assert redact_line(unit * 50_000).endswith("…")
    assert_growth(lambda size: (unit * size)[:size], redact_line, LONGEST_TEXT // 10)
