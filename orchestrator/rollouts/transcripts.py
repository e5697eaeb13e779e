"""Decodes rollouts for `rollouts.jsonl`: the new part of each prompt and the completion, special tokens included.

A prompt mostly repeats the conversation so far, so only the part after the turn that it extends is decoded: text grows with
tokens, not with turns squared. Of a long rollout only the beginning and the end are decoded, which bounds work and disk space.
`records.py` calls this in a worker thread, where one call decodes one rollout without the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from counterpoint.transport.files.atomic import as_bytes_view
from counterpoint.transport.records import Int32Array, Rollout, Turn

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Decodes sequences of token ids (`environments.chat.Chat.transcribe`)."""


@dataclass(frozen=True, slots=True)
class TurnText:
    """One turn as text."""

    prompt: str
    """Its part after the turn that it extends."""
    completion: str
    kept: tuple[int, int] = field(default=(0, 0), compare=False)
    """Tokens of the completion that are in the text: at its beginning, and at its end."""


@dataclass(frozen=True, slots=True)
class Transcriber:
    """Decodes at most `tokens` tokens of a rollout: the first and the last half of that number."""

    decode: Decode
    tokens: int

    def __call__(self, rollout: Rollout) -> list[TurnText]:
        """Returns the text of each turn, in order. Blocks: call it in a thread."""
        pieces = [ids for turn, prompt in _new_prompts(rollout.turns) for ids in (prompt, turn.completion_ids)]
        cut = [_Cut(ids, *self._kept(ids, start, total)) for ids, start, total in _placed(pieces)]
        texts = iter(self.decode([_decodable(part) for each in cut for part in (each.head, each.tail)]))
        whole = [each.joined(next(texts), next(texts)) for each in cut]
        kept = [(each.first, each.last) for each in cut]
        return list(map(TurnText, whole[::2], whole[1::2], kept[1::2]))

    def _kept(self, ids: Int32Array, start: int, total: int) -> tuple[int, int]:
        """Returns the numbers of kept tokens at both ends of a piece that begins at token `start` of `total`."""
        if total <= self.tokens:
            return len(ids), 0
        first, last = self.tokens - self.tokens // 2, total - self.tokens // 2
        head = min(len(ids), max(0, first - start))
        return head, min(len(ids) - head, max(0, start + len(ids) - last))


@dataclass(frozen=True, slots=True)
class _Cut:
    """A piece of a transcript, possibly without its middle."""

    ids: Int32Array
    first: int
    last: int

    @property
    def head(self) -> Int32Array:
        return self.ids[: self.first]

    @property
    def tail(self) -> Int32Array:
        return self.ids[len(self.ids) - self.last :]

    def joined(self, head: str, tail: str) -> str:
        left_out = len(self.ids) - self.first - self.last
        return f"{head}[... {left_out} tokens left out ...]{tail}" if left_out else head + tail


def _placed(pieces: Sequence[Int32Array]) -> Iterator[tuple[Int32Array, int, int]]:
    """Yields each piece, its first position in the transcript, and the transcript's length, in tokens."""
    total, start = sum(map(len, pieces)), 0
    for ids in pieces:
        yield ids, start, total
        start += len(ids)


def _new_prompts(turns: Sequence[Turn]) -> Iterator[tuple[Turn, Int32Array]]:
    """Yields each turn, and its prompt without the tokens of the newest earlier turn that it extends."""
    for index, turn in enumerate(turns):
        held = next((n for earlier in reversed(turns[:index]) if (n := _extended(turn, earlier))), 0)
        yield turn, turn.prompt_ids[held:]


def _extended(turn: Turn, earlier: Turn) -> int:
    """Returns the number of tokens of `earlier` if the turn's prompt begins with them, else 0. Compares bytes, in place."""
    begun, end = len(earlier.prompt_ids), len(earlier.prompt_ids) + len(earlier.completion_ids)
    prompt = turn.prompt_ids
    same = (
        end <= len(prompt)
        and _same(prompt[:begun], earlier.prompt_ids)
        and _same(prompt[begun:end], earlier.completion_ids)
    )
    return end if same else 0


def _same(one: Int32Array, other: Int32Array) -> bool:
    return as_bytes_view(np.ascontiguousarray(one)) == as_bytes_view(np.ascontiguousarray(other))


def _decodable(ids: Int32Array) -> list[int]:
    """Returns the ids that a tokenizer accepts. A rollout that failed for a negative id is recorded, too."""
    return [token for token in ids.ravel().tolist() if token >= 0]
