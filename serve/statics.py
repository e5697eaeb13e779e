"""The files of the page, as they stand in `serve/page/`: a fixed list, so that no request can name another file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parent / "page"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
}
"""What is served. Other files, such as licences, are not."""


@dataclass(frozen=True, slots=True)
class Static:
    """A file of the page."""

    content: bytes
    type: str
    tag: str


class Statics:
    """The files by their path in the URL, listed once, read again when they change."""

    def __init__(self, directory: Path = PAGE) -> None:
        """`directory` holds `index.html`, which stands for `/`, too."""
        self._files = {
            path.relative_to(directory).as_posix(): path
            for path in directory.rglob("*")
            if path.suffix in _TYPES and path.is_file()
        }
        self._read: dict[str, tuple[int, Static]] = {}

    def get(self, path: str) -> Static | None:
        """Returns the file at `path`, below `/`; None if there is none."""
        name = path or "index.html"
        file = self._files.get(name)
        if file is None:
            return None
        changed = file.stat().st_mtime_ns
        if name not in self._read or self._read[name][0] != changed:
            content = file.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            self._read[name] = changed, Static(content, _TYPES[file.suffix], tag)
        return self._read[name][1]
