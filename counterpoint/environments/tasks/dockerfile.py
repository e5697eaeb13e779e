"""Reads a Dockerfile that is a base image and copies, for a box. Refuses any other, and says what it needs.

A word is read, and a file is put, where BuildKit does it (`frontend/dockerfile/parser`, `shell/lex.go`, `solver/llbsolver/file`,
and `copy` of tonistiigi/fsutil): a file that is copied to the path of a directory lies in that directory, whatever made it.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from counterpoint.environments.sandbox.builder import DIRECTORIES

_IMAGE = re.compile(r"(?:docker\.io/)?(?:library/)?(debian|ubuntu|python)(?::([\w.-]+))?")
_PLATFORMS = {
    "x86_64": ("linux", "linux/amd64", "linux/amd64/v1", "linux/x86_64", "linux/x86-64", "amd64", "x86_64", "x86-64"),
    "aarch64": ("linux", "linux/arm64", "linux/arm64/v8", "linux/aarch64", "arm64", "aarch64"),
}
"""This machine's, as Docker lets it be written."""
_PLATFORM_VARIABLES = ("$BUILDPLATFORM", "${BUILDPLATFORM}", "$TARGETPLATFORM", "${TARGETPLATFORM}")
_TAKEN = ("usr", "bin", "sbin", "lib", "lib64", "etc", "proc", "dev", "sys", "python", "tests", "logs", "solution")
"""What is not for an environment's files: it is the machine's, or that of a phase."""
_OF_SOME_IMAGES = frozenset(
    {"/home/ubuntu", "/var/lock", "/var/log/apt", "/var/run"}
    | {f"/var/cache/{name}" for name in ("apt", "debconf", "ldconfig")}
    | {f"/var/lib/{name}" for name in ("apt", "dpkg", "misc", "pam", "systemd")}
)
"""Directories that an image may have and a box has not."""
_WITHOUT_EFFECT = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")
_MOST_MODE = 0o7777
_CONTINUED = re.compile(r"(?<!\\)\\[ \t]*(?:\n(?:[ \t]*\n)*|\Z)")
"""The end of a line that goes on in the next one that is not empty, with nothing between them. Two backslashes are one."""
_PATTERN = re.compile(r"\\(.)|(\*)|(\?)|\[(\^?)((?:\\.|[^\]\\])+)\]|([^\\*?\[])")


class Placed(NamedTuple):
    """A file or directory of a task, and where it is in a box."""

    file: Path
    path: str
    mode: int | None = None
    """The mode that a Dockerfile gives it; None for the file's own."""


class Dockerfile:
    """What an environment puts into a box: read from the directory `place`, by its Dockerfile or without one."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._workdir = PurePosixPath("/")
        self.files: list[Placed] = []
        """What begins in the box. A directory stands for itself, without what is in it."""
        self.variables: dict[str, str] = {}
        self._images = 0
        self._is_directory = dict.fromkeys(map(PurePosixPath, ("/", *DIRECTORIES)), True)
        """What there is at paths of the box, and whether it is a directory."""

    @property
    def workdir(self) -> str:
        """Where commands begin."""
        return str(self._workdir)

    def read(self) -> None:
        """Reads the Dockerfile. Raises `ValueError` for what a box does not have."""
        for name in (".dockerignore", "Dockerfile.dockerignore"):
            if (self._place / name).exists():
                raise ValueError(f"environment/ has a {name}, which is not read here")
        text = (self._place / "Dockerfile").read_text("utf-8-sig")
        if re.search(r"^\s*#\s*escape\s*=\s*`", text, re.IGNORECASE | re.MULTILINE):
            raise ValueError("environment/Dockerfile has the directive escape=`, which is not read here")
        lines = [line for line in re.split(r"\r?\n", text) if not line.lstrip().startswith("#")]
        for line in _CONTINUED.sub("", "\n".join(lines)).split("\n"):
            if line.strip():
                word, *rest = line.split(None, 1)
                self._instruction(word.upper(), rest[0].strip() if rest else "")
        if not self._images:
            raise ValueError("environment/Dockerfile has no FROM")

    def go_to(self, workdir: str) -> None:
        """Makes a directory where commands begin. Raises `ValueError` where none may be."""
        self._workdir = self._inside(workdir)
        self._put(Placed(self._place, self.workdir), is_directory=True)

    def copy_all(self) -> None:
        """Puts all of `place` into the working directory."""
        self._put_below(self._place, self._workdir, None)

    def _instruction(self, word: str, rest: str) -> None:
        said = f"environment/Dockerfile: {word} {rest[:60]}"
        if word in _WITHOUT_EFFECT or (word == "USER" and _unquoted(rest) in ("root", "0", "root:root", "0:0")):
            return
        if word not in ("FROM", "WORKDIR", "ENV", "COPY"):
            raise ValueError(f"{said}: it needs Docker; a box takes FROM, WORKDIR, ENV and COPY only")
        try:
            flags, rest = _flags(rest)
            if word == "FROM":
                return self._from(flags, rest)
            if "$" in rest or (word == "COPY" and "<<" in rest):
                raise ValueError("variables and heredocs are not read here")
            if word == "COPY":
                return self._copy(flags, rest)
            if flags or not rest:
                raise ValueError(f"expected {'a directory' if word == 'WORKDIR' else 'NAME=VALUE'}")
            if word == "WORKDIR":
                return self.go_to(_unquoted(rest))
            self._set(rest)
        except ValueError as error:
            raise ValueError(f"{said}: {error}") from error

    def _from(self, flags: dict[str, str], rest: str) -> None:
        self._images += 1
        if self._images > 1:
            raise ValueError("it has several stages: it needs Docker")
        platform = flags.pop("platform", None)
        if platform not in (None, *_PLATFORM_VARIABLES) and platform.lower() not in _PLATFORMS[os.uname().machine]:
            raise ValueError(f"the platform {platform} is not this machine's, which is {os.uname().machine}")
        match rest.split():
            case [image] if not flags:
                check_image(image)
            case [image, as_, _] if not flags and as_.upper() == "AS":
                check_image(image)
            case _:
                raise ValueError("expected an image, with --platform before it or AS NAME after it")

    def _set(self, rest: str) -> None:
        name, *value = rest.split(None, 1)
        if "=" not in name and value:  # the older form: NAME VALUE
            self.variables[_unquoted(name)] = _unquoted(value[0])
            return
        pairs = shlex.split(rest)
        if not all(pair.partition("=")[0] and "=" in pair for pair in pairs):
            raise ValueError("expected NAME=VALUE")
        self.variables |= dict(pair.split("=", 1) for pair in pairs)

    def _copy(self, flags: dict[str, str], rest: str) -> None:
        mode, is_linked = _copy_flags(flags)
        words = _words(rest)
        if len(words) < 2:
            raise ValueError("expected files of environment/ and a destination")
        *sources, destination = words
        into = self._inside(destination)
        # A destination names a directory, or is the path of one. With --link it is put into an empty image of its own.
        by_name = destination in ("", ".") or destination.endswith(("/", "/."))
        is_there = self._is_directory.get(into, False)
        is_directory = by_name or (is_there and not is_linked)
        if len(sources) > 1 and not by_name:
            raise ValueError("the destination of several files has to end with a slash")
        found = [each for source in sources for each in self._sources(source)]
        if not is_directory and any(not each.is_dir() for each in found):
            if len(found) > 1:
                raise ValueError(f"several files match, and {into} is no directory: end it with a slash")
            if is_there:
                raise ValueError(f"with --link the file would replace the directory {into}: end it with a slash")
            if str(into) in _OF_SOME_IMAGES:
                raise ValueError(f"{into} is a directory in some images: end it with a slash")
        for each in found:
            if each.is_dir():
                self._put_below(each.resolve(), into, mode)
            else:
                path = into / each.name if is_directory else into
                self._put(Placed(each.resolve(), str(path), mode), is_directory=False)

    def _sources(self, source: str) -> list[Path]:
        """The files of `place` that a source of COPY names. A path that goes above `place` is one in it, as in Docker."""
        found = [self._place]
        for part in filter(None, posixpath.normpath(f"/{source}").split("/")):
            if re.search(r"[*?\[\\]", part):
                matches = _pattern(part).fullmatch
                found = [each for one in found if one.is_dir() for each in sorted(one.iterdir()) if matches(each.name)]
            else:
                found = [one / part for one in found if (one / part).exists()]
        if not found:
            raise ValueError(f"there is no such file in environment/: {source}")
        if not all(each.resolve().is_relative_to(self._place.resolve()) for each in found):
            raise ValueError(f"{source} leads out of environment/")
        return found

    def _inside(self, path: str) -> PurePosixPath:
        return PurePosixPath("/" + posixpath.normpath(self._workdir / path).lstrip("/"))

    def _put_below(self, directory: Path, into: PurePosixPath, mode: int | None) -> None:
        self._put(Placed(directory, str(into), mode), is_directory=True)
        for placed in below(directory, str(into), mode):
            self._put(placed, is_directory=placed.file.is_dir() and not placed.file.is_symlink())

    def _put(self, placed: Placed, *, is_directory: bool) -> None:
        path = PurePosixPath(placed.path)
        if len(path.parts) > 1 and path.parts[1] in _TAKEN:
            raise ValueError(f"{path}: this place is not the environment's in a box")
        for parent in path.parents:
            if not self._is_directory.setdefault(parent, True):
                raise ValueError(f"{path}: {parent} is a file")
        if self._is_directory.setdefault(path, is_directory) != is_directory:
            raise ValueError(f"{path} is a {'file' if is_directory else 'directory'} already")
        self.files.append(placed)


def below(place: Path, directory: str, mode: int | None = None) -> Iterator[Placed]:
    """Each file and directory below `place`, put below `directory`. Links to directories are not followed."""
    for file in sorted(place.rglob("*")) if place.is_dir() else ():
        yield Placed(file, str(PurePosixPath(directory) / file.relative_to(place).as_posix()), mode)


def check_image(image: str) -> None:
    """Raises `ValueError` for an image that has more than this machine's programs."""
    name, _, digest = image.partition("@")
    found = _IMAGE.fullmatch(name)
    if found is None:
        raise ValueError(
            f"the image is {image}: only debian, ubuntu and python are played, with this machine's programs"
        )
    if digest:
        raise ValueError(
            f"the image is one by its digest, {digest[:20]}: a box has this machine's programs; take {name} if it will do"
        )
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    version = re.match(r"\d+\.\d+", found[2] or "")
    if found[1] == "python" and version and version[0] != ours:
        raise ValueError(f"the image is {image}: this machine's Python is {ours}; take python:{ours} if it will do")


def _flags(rest: str) -> tuple[dict[str, str], str]:
    """Returns the flags that an instruction begins with, and what follows them."""
    flags = {}
    while rest.startswith("--"):
        flag, *more = rest.split(None, 1)
        name, _, value = flag[2:].partition("=")
        flags[name], rest = _unquoted(value), more[0] if more else ""
    return flags, rest


def _copy_flags(flags: dict[str, str]) -> tuple[int | None, bool]:
    """Returns the mode of --chmod, and whether --link is set. A box has one user, so --chown changes nothing."""
    mode, is_linked = None, False
    for name, value in flags.items():
        if name == "from":
            raise ValueError("it copies from another stage or image: it needs Docker")
        if name == "chmod":
            if not re.fullmatch("[0-7]+", value) or int(value, 8) > _MOST_MODE:
                raise ValueError(f"--chmod={value}: expected octal digits, such as 0755")
            mode = int(value, 8)
        elif name == "link" and value in ("", "true", "false"):
            is_linked = value != "false"
        elif name != "chown":
            raise ValueError(f"--{name} is not read here; --chmod, --chown and --link are")
    return mode, is_linked


def _words(rest: str) -> list[str]:
    """The words of COPY: a list as JSON, or else separated by white space, which quotation marks do not protect there."""
    words: Sequence[object] = rest.split()
    if rest.startswith("["):
        try:
            words = json.loads(rest)
        except ValueError:
            pass  # a pattern, such as [ab].txt
    if not all(isinstance(word, str) for word in words):
        raise ValueError("expected a list of strings")
    return [_unquoted(str(word)) for word in words]


def _unquoted(word: str) -> str:
    """A word without its quotation marks and escapes. Raises `ValueError` for a mark without its other one."""
    lexer = shlex.shlex(word, posix=True)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = "", True, ""
    return "".join(lexer)


def _pattern(part: str) -> re.Pattern[str]:
    """A part of a path with `*`, `?`, `[a-z]` or `[^a-z]`, as `path/filepath.Match` of Go reads it: `**` is no more than `*`."""
    expression, end = "", 0
    for found in _PATTERN.finditer(part):
        escaped, star, question, is_not, among, plain = found.groups()
        if found.start() != end:
            break
        end = found.end()
        if among:
            # Of the special characters, only the dash keeps its meaning.
            each = re.sub(r"\\(.)|([^-])", lambda one: re.escape(one[1] or one[2]), among)
            expression += f"[{is_not}{each}]"
        else:
            expression += "[^/]*" if star else "[^/]" if question else re.escape(escaped or plain)
    if end != len(part):
        raise ValueError(f"{part} is no pattern")
    try:
        return re.compile(expression, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{part} is no pattern: {error}") from error
