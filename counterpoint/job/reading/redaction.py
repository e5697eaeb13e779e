"""A run's configuration, and a line of its log, as others may see them, on the page and in W&B: without what could be a secret.

Our own keys name files of secrets, never secrets. But an environment's `args`, a command line and an address may hold anything.
What only looks like a secret is hidden, too.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from counterpoint.job.directory import JOB_FILE, written_config
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.transport.printable import printable

HIDDEN = "(hidden)"

LONGEST_TEXT = 4_000
MOST_VALUES = 5_000
"""Values that are shown; the others are left out."""

MOST_JOB_BYTES = 16 * 2**20
SECTIONS = ("model", "seed", "backend", "inference", "trainer")

_NAME = re.compile(
    r"(?i)key|token|secret|passw|passphrase|credential|auth|bearer|cookie|dsn|session|pwd|header|webhook|private"
)
"""A name of what may be a secret."""
_PASSWORD = re.compile(r"(?i)secret|passw|passphrase|pwd|credential")
"""A name of what is a secret even if it is a number. `max_tokens` is none."""
_PATH = re.compile(r"(?i)_(file|path|directory)$")
_PLAIN = frozenset({"tokenizer"})

_TEXT = re.compile(r"(sk-|hf_|ghp_|gho_|xox[bap]-|AKIA|eyJ)[A-Za-z0-9_\-]{8,}|-----BEGIN|(?i:bearer)\s+\S")
# Each begins where a word does, or is bounded: text of a run's own must not take time that grows with its square.
_LOGIN = re.compile(r"(?<!\w)(\w++://)\S*@")
_PARAMETER = re.compile(r"([?&#;]|(?<!-)--?)([\w.-]{1,200}+)=([^&\s#]+)")
_ASSIGNED = re.compile(r"""(?<![\w.-])([\w.-]{1,200}+)(["']?\s{0,3}[:=]\s{0,3}\[?["']?)([^\s"',;&<>(){}\[\]]{6,})""")
"""A name and what it is in a line of a log: `NAME=VALUE`, `name: value`, `'name': ['value']`."""
_CREDENTIAL = re.compile(
    r"(?i)(api|access|secret|private|auth)[_.-]?key|secret|passw|passphrase|pwd|credential|cookie|(^|[_.-])token$"
)
"""A name of a secret also in a line of text, which names much else that has a key, a session or tokens."""


def run_configuration(directory: Path, run_id: str) -> dict[str, Any]:
    """Returns the run's configuration, for JSON; empty if it cannot be read."""
    found: dict[str, Any] = redact(written_config(directory, run_id))
    return found


def whole_configuration(directory: Path, run_id: str) -> dict[str, Any]:
    """Returns the run's configuration, as `run`, beside what its job has in common."""
    try:
        job = read_json(directory / JOB_FILE, MOST_JOB_BYTES)
    except (OSError, UntrustedFileError):  # roles that were started one by one have none
        job = {}
    shared: dict[str, Any] = redact({name: job[name] for name in SECTIONS if name in job})
    return shared | {"run": run_configuration(directory, run_id)}


def redact(value: Any) -> Any:
    """Returns a copy for JSON without secrets: below a name such as `api_key`, and what looks like one."""
    return _Copy().value(value, "")


def redact_line(line: str) -> str:
    """Returns a line of a log, printable, without what looks like a secret; an ellipsis ends one of over `LONGEST_TEXT`."""
    text = _ASSIGNED.sub(_without_value, _without_secrets(printable(line[:LONGEST_TEXT])))
    return f"{text}…" if len(line) > LONGEST_TEXT else text


def _without_value(found: re.Match[str]) -> str:
    name, between, value = found.groups()
    if not _CREDENTIAL.search(name) or _PATH.search(name) or (value.isdecimal() and not _PASSWORD.search(name)):
        return found[0]
    return f"{name}{between}{HIDDEN}"


class _Copy:
    """Copies values, so many at most."""

    def __init__(self) -> None:
        self._left = MOST_VALUES

    def value(self, value: Any, name: str) -> Any:
        """The value below a name: of the nearest table, or of the flag before it."""
        self._left -= 1
        if self._left < 0:
            return None
        if isinstance(value, Mapping):
            return {
                printable(str(key)[:200]): self.value(each, name if _may_be_secret(name) else str(key))
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return self._list(value, name)
        if isinstance(value, str):
            return HIDDEN if value and _may_be_secret(name) else _without_secrets(printable(value[:LONGEST_TEXT]))
        if isinstance(value, bool) or value is None:
            return value
        if _PASSWORD.search(name) and _may_be_secret(name):
            return HIDDEN
        return _number_or_text(value)

    def _list(self, values: Sequence[Any], name: str) -> list[Any]:
        """The values; one after a flag such as `--api-key` is the flag's."""
        copied, flag = [], ""
        for each in values[: max(0, self._left) + 1]:
            copied.append(self.value(each, name if _may_be_secret(name) else flag or name))
            flag = each if isinstance(each, str) and re.fullmatch(r"--?[\w.-]+", each) else ""
        return copied


def _may_be_secret(name: str) -> bool:
    return _NAME.search(name) is not None and _PATH.search(name) is None and name.lower() not in _PLAIN


def _number_or_text(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value)[:100]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return str(value)[:100]


def _without_secrets(text: str) -> str:
    """Hides the text, or the login and the parameters of an address in it."""
    if _TEXT.search(text):
        return HIDDEN
    text = _LOGIN.sub(rf"\1{HIDDEN}@", text)
    return _PARAMETER.sub(lambda found: found[0] if not _hides(found[2]) else f"{found[1]}{found[2]}={HIDDEN}", text)


def _hides(parameter: str) -> bool:
    return _may_be_secret(parameter) or re.search(r"(?i)sig", parameter) is not None
