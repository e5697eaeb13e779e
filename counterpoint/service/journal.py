"""The journal of one driven run: its items before they are sent, and their results before anybody hears of them.

`item_N` is a file of frames (`transport/codec.py`): a note of the asker's, then the frames of the item. `answer_N` has those of
the answer. `early_N` is the note of a request that is no item yet, since it waits for an earlier one. `failed_N` is the note of
a request that became none. `lost` says why the run goes on no more. Everything blocks: call it in a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from counterpoint.transport import codec
from counterpoint.transport.files.atomic import as_bytes_view, write_atomically
from counterpoint.transport.messages import Answered, Ask

KEPT_FAILED = 256
"""Numbers of requests that are known to be no items."""

FORGOTTEN_AT_ONCE = 32
"""Items that are removed together, so that few flushes of the disk hold up a caller."""


class Journal:
    """The items and answers of a run, in a directory."""

    def __init__(
        self, directory: Path, run_id: str, max_batch_bytes: int, before_forgetting: Callable[[], None] = lambda: None
    ) -> None:
        """Makes the directory. Raises `OSError`.

        `before_forgetting` returns once the disk has all that its user would make anew from the items. It may raise `OSError`.
        """
        self.directory = directory
        self._run_id = run_id
        self._max_batch_bytes = max_batch_bytes
        self._before_forgetting = before_forgetting
        directory.mkdir(parents=True, exist_ok=True)

    def items(self) -> list[int]:
        """Returns the numbers of its items, ascending."""
        return self._numbers("item_")

    def answers(self) -> list[int]:
        """Returns the numbers of the answered items, ascending."""
        return self._numbers("answer_")

    def _numbers(self, prefix: str) -> list[int]:
        names = (path.name.removeprefix(prefix) for path in self.directory.glob(f"{prefix}*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def item_path(self, number: int) -> Path:
        """Returns the file of an item."""
        return self.directory / f"item_{number}"

    def answer_path(self, number: int) -> Path:
        """Returns the file of the result of an item."""
        return self.directory / f"answer_{number}"

    def write_item(self, ask: Ask, note: bytes) -> None:
        """Writes an item, durably. Raises `OSError`, and `ValueError` for a batch that cannot travel."""
        frames = [note, *codec.encode_ask(ask, self._run_id)]
        write_atomically(self.item_path(ask.number), *codec.file_buffers(frames))

    def read_item(self, number: int) -> tuple[Ask, bytes]:
        """Returns an item, and its note. Raises `CodecError` and `OSError`."""
        limit = self._max_batch_bytes + codec.MAX_HEADER_BYTES
        note, *frames = codec.read_frames(self.item_path(number), limit)
        return codec.decode_ask(frames, self._max_batch_bytes), bytes(as_bytes_view(note))

    def write_answer(self, answered: Answered) -> None:
        """Writes the result of an item, durably. Raises `OSError`."""
        frames = codec.encode_answered(answered, self._run_id)
        write_atomically(self.answer_path(answered.number), *codec.file_buffers(frames))

    def read_answer(self, number: int) -> Answered | None:
        """Returns the result of an item, or None if it is unknown. Raises `CodecError` and `OSError`."""
        try:
            frames = codec.read_frames(self.answer_path(number), codec.MAX_ANSWER_BYTES)
        except FileNotFoundError:
            return None
        return codec.decode_answered(frames)

    def early(self) -> list[int]:
        """Returns the numbers of its early notes, ascending."""
        return self._numbers("early_")

    def write_early(self, number: int, note: bytes) -> None:
        """Writes an early note, durably. Raises `OSError`."""
        write_atomically(self.directory / f"early_{number}", note)

    def read_early(self, number: int) -> bytes:
        """Returns an early note. Raises `OSError`."""
        return (self.directory / f"early_{number}").read_bytes()

    def forget_early(self, number: int) -> None:
        """Removes an early note, if it is there. Raises `OSError`."""
        (self.directory / f"early_{number}").unlink(missing_ok=True)

    def write_failed(self, number: int, note: bytes) -> None:
        """Writes, durably, that a request became no item, and forgets old notes of this kind. Raises `OSError`."""
        write_atomically(self.directory / f"failed_{number}", note)
        (self.directory / f"failed_{number - KEPT_FAILED}").unlink(missing_ok=True)

    def failed(self) -> dict[int, bytes]:
        """Returns the notes of requests that became no item, by number, ascending. Raises `OSError`."""
        return {number: (self.directory / f"failed_{number}").read_bytes() for number in self._numbers("failed_")}

    def write_lost(self, reason: str) -> None:
        """Writes, durably, why the run goes on no more. Raises `OSError`."""
        write_atomically(self.directory / "lost", reason.encode())

    def lost(self) -> str:
        """Returns why the run goes on no more, or an empty text if it does. Raises `OSError`."""
        path = self.directory / "lost"
        return path.read_text() if path.exists() else ""

    def forget(self, up_to: int) -> None:
        """Removes the items up to this one, and their answers, once they are many. Raises `OSError`."""
        items = [number for number in self.items() if number <= up_to]
        if len(items) >= FORGOTTEN_AT_ONCE:
            self._before_forgetting()
            for number in items:
                self.answer_path(number).unlink(missing_ok=True)
                self.item_path(number).unlink()
