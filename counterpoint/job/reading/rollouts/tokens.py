"""Single tokens of a completion: their text, and their log-probabilities at inference and, where exported, at the trainer.

The orchestrator records token ids and log-probabilities beside the records (`orchestrator/rollouts/token_file.py`). The trainer
writes its own with `training.token_export` (`counterpoint/trainer/telemetry/token_export.py`). Where one is missing, this says
why.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from counterpoint.job.directory import JOB_FILE, MAX_JOB_BYTES, written_config
from counterpoint.job.reading.rollouts.rollout_records import RolloutRecord, finite_number, records_file
from counterpoint.orchestrator.rollouts.token_file import TOKENS_FILE, CompletionTokens, TokenFileError, read_tokens
from counterpoint.transport.config import Config
from counterpoint.transport.files.untrusted import UntrustedFileError, open_regular, parse_json, read_bytes, read_json
from counterpoint.transport.printable import printable

MAX_TOKENIZER_BYTES = 64 * 2**20
MAX_EXPORTED_LINE = 64 * 2**20

UNFINISHED_TOKENS = 8
"""Tokens that may be pending as parts of one character, before each is shown as what it is alone."""


class TokensAnswer(Config):
    """The tokens of one completion, as columns of equal length."""

    positions: list[int]
    """The positions in the completion, from 0."""
    token_ids: list[int]
    """The ids in the model's vocabulary."""
    texts: list[str]
    """A character of several tokens is in the last of them; the others are empty."""
    log_probabilities: list[float | None]
    """Log-probabilities at inference, when they were sampled."""
    trainer: list[float | None]
    """Log-probabilities at the trainer; all None where it is not known."""
    trained: list[bool]
    """Whether it may be trained: its environment has not left it out."""
    total: int
    """Tokens of the completion."""
    recorded: int
    """How many of these were recorded."""
    missing: str
    """Why there are no tokens; empty if there are."""
    no_text: str
    """Why the texts are numbers; empty if they are not."""
    no_trainer: str
    """Why the trainer's log-probabilities are not known; empty if they are."""


def turn_tokens(
    directory: Path,
    run: str,
    step: int,
    number: int,
    record: RolloutRecord,
    turn: int,
    begin: int,
    most: int,
    until: float,
) -> TokensAnswer:
    """Reads the tokens `begin` to `begin + most - 1` of those that are recorded of one turn of one rollout."""
    try:
        rollout_id, turns = read_tokens(records_file(directory, run, step).with_name(TOKENS_FILE), number)
    except FileNotFoundError:
        return _without_tokens(_why_unrecorded(directory, run))
    except (OSError, TokenFileError, UntrustedFileError) as error:
        return _without_tokens(f"{TOKENS_FILE} of this step cannot be read: {_short(error)}")
    if rollout_id != record.rollout_id or turn >= len(turns):
        return _without_tokens(f"{TOKENS_FILE} of this step does not fit its rollouts.jsonl")
    found = turns[turn]
    if not found.total:
        return _without_tokens("this completion is empty, or its arrays did not fit each other when it failed")
    trainer, no_trainer = _trainer_values(directory, run, step, record, turn, found, until)
    try:
        texts, no_text = _texts(tokenizer_of(directory, run), found), ""
    except (OSError, ValueError) as error:
        texts, no_text = [f"[{token}]" for token in found.token_ids.tolist()], _short(error)
    values, positions = found.log_probabilities.tolist(), found.positions.tolist()
    shown = range(begin, min(begin + most, len(positions)))
    return TokensAnswer(
        positions=[positions[index] for index in shown],
        token_ids=[int(found.token_ids[index]) for index in shown],
        texts=[printable(texts[index]) for index in shown],
        log_probabilities=[values[index] if math.isfinite(values[index]) else None for index in shown],
        trainer=[trainer.get(positions[index]) for index in shown],
        trained=[not found.untrained[index] for index in shown],
        total=found.total,
        recorded=len(positions),
        missing="",
        no_text=no_text,
        no_trainer=no_trainer,
    )


def _without_tokens(missing: str) -> TokensAnswer:
    columns: dict[str, Any] = {name: [] for name in ("positions", "token_ids", "texts", "log_probabilities")}
    return TokensAnswer(
        **columns, trainer=[], trained=[], total=0, recorded=0, missing=missing, no_text="", no_trainer=""
    )


def _why_unrecorded(directory: Path, run: str) -> str:
    if written_config(directory, run).get("recorded_tokens") == 0:
        return "the run records no tokens: its recorded_tokens is 0"
    return f"this step has no {TOKENS_FILE}: an earlier version wrote it, or recorded_tokens was 0"


# --- the text of tokens ---


def tokenizer_of(directory: Path, run: str) -> Tokenizer:
    """Returns the tokenizer of the run's model. Raises `OSError` and `ValueError` with what is wrong."""
    model = _model_of(directory, run)
    path = model / "tokenizer.json"
    try:
        return _load(path, path.stat().st_mtime_ns)
    except OSError as error:
        raise ValueError(f"the model's tokenizer.json cannot be read: {error.strerror}") from None


@lru_cache(maxsize=4)
def _load(path: Path, modified: int) -> Tokenizer:
    """Returns the tokenizer in a file of that time. A model's cache may consist of links."""
    data = read_bytes(path.resolve(), MAX_TOKENIZER_BYTES)
    try:
        return Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises nothing more particular
        raise ValueError(f"the model's tokenizer.json is no tokenizer: {error}") from error


def _model_of(directory: Path, run: str) -> Path:
    """Returns the model's directory: as the job's file says, or the run's if its roles were started one by one."""
    given: Any = None
    try:
        job = read_json(directory / JOB_FILE, MAX_JOB_BYTES)
        sections = [job.get(name) for name in ("trainer", "orchestrator")]
        given = next(
            (section["model"] for section in sections if isinstance(section, dict) and "model" in section), None
        )
    except FileNotFoundError:
        given = written_config(directory, run).get("model")
    if not isinstance(given, str):
        raise ValueError("the model of the run is not known: neither job.json nor orch.toml names it")
    return Path(given)


def _texts(tokenizer: Tokenizer, found: CompletionTokens) -> list[str]:
    """Returns a text for each token. The tokens of one character have it at the last of them."""
    ids = found.token_ids.tolist()
    return _decoded(tokenizer, ids[: found.first]) + _decoded(tokenizer, ids[found.first :])


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    texts: list[str] = []
    stream, pending = DecodeStream(skip_special_tokens=False), 0
    for token in ids:
        text = None
        if 0 <= token < 2**31 and pending < UNFINISHED_TOKENS:
            text = stream.step(tokenizer, token)
        else:  # parts of characters without an end: decoding them again with each takes time that grows with their square
            stream, pending, text = DecodeStream(skip_special_tokens=False), 0, "\ufffd"
        pending = pending + 1 if text is None else 0
        texts.append(text or "")
    for index in range(len(texts) - pending, len(texts)):
        texts[index] = "\ufffd"
    return texts


# --- the trainer's log-probabilities ---


def _trainer_values(
    directory: Path, run: str, step: int, record: RolloutRecord, turn: int, found: CompletionTokens, until: float
) -> tuple[dict[int, float], str]:
    """Returns the trainer's log-probabilities by position in the completion, and why there are none."""
    files = sorted((directory / "trainer" / "tokens" / run).glob(f"step_{step}.rank_*.jsonl"))
    if not files:
        training = written_config(directory, run).get("training")
        if isinstance(training, dict) and training.get("token_export"):
            return {}, "the trainer has not exported this step (yet)"
        return {}, "the trainer exports no log-probabilities: training.token_export is off"
    start = finite_number(record.turns[turn].get("prompt_tokens")) if turn < len(record.turns) else None
    if start is None:
        return {}, "the record does not say where the completion begins"
    wanted = {
        int(start) + position: token
        for position, token, skipped in zip(found.positions.tolist(), found.token_ids, found.untrained, strict=True)
        if not skipped
    }
    try:
        for line in _lines_of(files, record.rollout_id, until):
            values = _matching(line, wanted)
            if values is not None:
                return {position - int(start): value for position, value in values.items()}, ""
    except TimeoutError:
        return {}, "the trainer's export is too large to be searched in time"
    except (OSError, UntrustedFileError) as error:
        return {}, f"the trainer's export cannot be read: {_short(error)}"
    return {}, "the trainer's export has no sample of this turn: it was not trained"


def _lines_of(files: Sequence[Path], rollout_id: str, until: float) -> Iterator[dict[str, Any]]:
    needle = rollout_id.encode()
    for path in files:
        with open_regular(path) as file:
            while line := file.readline(MAX_EXPORTED_LINE):
                if time.monotonic() >= until:
                    raise TimeoutError
                if needle in line[:4096] and (found := parse_json(line)).get("rollout_id") == rollout_id:
                    yield found


def _matching(line: dict[str, Any], wanted: dict[int, int]) -> dict[int, float] | None:
    """Returns the sample's values of the wanted positions, if it has the same tokens there."""
    columns = [line.get(name) for name in ("position", "token_id", "trainer_log_probability")]
    if not all(isinstance(column, list) for column in columns):
        return None
    found: dict[int, float] = {}
    for position, token, value in zip(*columns, strict=False):
        if type(position) is not int or position not in wanted:
            continue
        if wanted[position] != token:
            return None
        if (number := finite_number(value)) is not None:
            found[position] = number
    return found or None


def _short(error: Exception) -> str:
    """Returns the reason without paths of this machine."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    text = printable(str(error))
    return text.rpartition(TOKENS_FILE)[2].lstrip(": ") or text
