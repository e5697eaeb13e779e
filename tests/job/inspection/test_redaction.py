"""What others may see of a configuration."""

from __future__ import annotations

import json

import pytest

from job.inspection.redaction import HIDDEN, redact


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
