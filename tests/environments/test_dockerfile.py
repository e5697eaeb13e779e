"""A Dockerfile's words, and where its copies go: as BuildKit has it, or refused with what it needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from counterpoint.environments.tasks.dockerfile import Dockerfile

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
PLATFORM, OTHER = ("linux/amd64", "linux/arm64") if os.uname().machine == "x86_64" else ("linux/arm64", "linux/amd64")


def read(place: Path, dockerfile: str) -> Dockerfile:
    for name in ("a.txt", "b.txt", "c.md", "a b.txt", ".hidden", "data/d.txt", "data/deep/e.txt", "[x].txt", "^.md"):
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    (place / "Dockerfile").write_text(dockerfile)
    found = Dockerfile(place)
    found.read()
    return found


def files(found: Dockerfile) -> dict[str, str]:
    """The text of each file, by its place in the box."""
    return {placed.path: placed.file.read_text() for placed in found.files if placed.file.is_file()}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # a directory, whatever made it
        ("COPY a.txt /srv/x/", {"/srv/x/a.txt": "a.txt"}),
        ("COPY a.txt /srv/x/.", {"/srv/x/a.txt": "a.txt"}),
        ("COPY a.txt /srv/x", {"/srv/x": "a.txt"}),
        ("COPY a.txt /notes.", {"/notes.": "a.txt"}),
        ("COPY a.txt /", {"/a.txt": "a.txt"}),
        ("COPY a.txt /srv", {"/srv/a.txt": "a.txt"}),
        ("COPY a.txt /var/lib", {"/var/lib/a.txt": "a.txt"}),
        ("COPY a.txt /tmp", {"/tmp/a.txt": "a.txt"}),
        ("WORKDIR /app\nCOPY a.txt .", {"/app/a.txt": "a.txt"}),
        ("WORKDIR /app/in\nCOPY a.txt /app", {"/app/a.txt": "a.txt"}),
        ("WORKDIR /app/in\nCOPY a.txt ..", {"/app/a.txt": "a.txt"}),
        ("WORKDIR /app/in\nWORKDIR ../x\nCOPY a.txt ./", {"/app/x/a.txt": "a.txt"}),
        ("COPY a.txt /x/y/a.txt\nCOPY b.txt /x", {"/x/y/a.txt": "a.txt", "/x/b.txt": "b.txt"}),
        ("COPY data/deep /x/deep\nCOPY b.txt /x/deep", {"/x/deep/e.txt": "data/deep/e.txt", "/x/deep/b.txt": "b.txt"}),
        ("COPY a.txt /x\nCOPY b.txt /x", {"/x": "b.txt"}),
        ("COPY a.txt b.txt /x/", {"/x/a.txt": "a.txt", "/x/b.txt": "b.txt"}),
        # what is copied
        ("COPY data/ /x", {"/x/d.txt": "data/d.txt", "/x/deep/e.txt": "data/deep/e.txt"}),
        ("COPY /data/deep /x", {"/x/e.txt": "data/deep/e.txt"}),
        ("COPY ../../data/./deep /x", {"/x/e.txt": "data/deep/e.txt"}),
        ("COPY [ab].txt /x/", {"/x/a.txt": "a.txt", "/x/b.txt": "b.txt"}),
        ("COPY [^a].txt /x/", {"/x/b.txt": "b.txt"}),
        ("COPY ?.md /x/", {"/x/c.md": "c.md", "/x/^.md": "^.md"}),
        ("COPY [a-c].m* /x", {"/x": "c.md"}),
        ("COPY **/*.txt /x/", {"/x/d.txt": "data/d.txt"}),
        ("COPY */deep /x", {"/x/e.txt": "data/deep/e.txt"}),
        ("COPY *idden /x/", {"/x/.hidden": ".hidden"}),
        # words
        ('COPY ["a b.txt", "/x/"]', {"/x/a b.txt": "a b.txt"}),
        ('COPY "a.txt" \'/srv/"x"/\'', {'/srv/"x"/a.txt': "a.txt"}),
        ("COPY\ta.txt\t/x", {"/x": "a.txt"}),
        ("copy --chown=1000:1000 a.txt /x", {"/x": "a.txt"}),
        ("COPY --link a.txt /x", {"/x": "a.txt"}),
        ("COPY --link=false a.txt /opt", {"/opt/a.txt": "a.txt"}),
        ("COPY --link data /opt", {"/opt/d.txt": "data/d.txt", "/opt/deep/e.txt": "data/deep/e.txt"}),
        ("COPY \\\n# a comment\n  a.txt \\\n  /x", {"/x": "a.txt"}),
        ("COPY a.txt /x\\\n/y", {"/x/y": "a.txt"}),
        ("COPY a.txt \\  \n\n \t\n# a comment\n\n /x", {"/x": "a.txt"}),
        ("COPY a.txt \\\r\n /x\r", {"/x": "a.txt"}),
        ("COPY a.txt /x \\", {"/x": "a.txt"}),
        ("LABEL a=\u2028COPY", {}),
    ],
)  # fmt: skip
def test_a_file_is_where_docker_puts_it(tmp_path: Path, lines: str, expected: dict[str, str]) -> None:
    assert files(read(tmp_path, f"FROM debian\n{lines}\n")) == expected


@pytest.mark.parametrize(
    ("line", "workdir"),
    [
        ('WORKDIR "/my app"', "/my app"),
        ("WORKDIR '/my app'", "/my app"),
        ("WORKDIR /my app", "/my app"),
        ("WORKDIR /my\\ app", "/my app"),
        ("WORKDIR //srv//x/../y/", "/srv/y"),
        ('WORKDIR /a"b"c', "/abc"),
    ],
)
def test_a_workdir_is_one_word(tmp_path: Path, line: str, workdir: str) -> None:
    assert read(tmp_path, f"FROM debian\n{line}\n").workdir == workdir


@pytest.mark.parametrize(
    "line",
    [
        "FROM debian AS base",
        "from debian:12 as base",
        f"FROM --platform={PLATFORM} python:{HERE}-slim AS base",
        "FROM --platform=$BUILDPLATFORM ubuntu:24.04",
        "FROM --platform=${TARGETPLATFORM} docker.io/library/debian",
        "\ufeffFROM debian",
        "# syntax=docker/dockerfile:1\n\n  # text\nFROM debian\nUSER root:root\nLABEL a=$b\n",
    ],
)
def test_a_base_that_changes_nothing_is_taken(tmp_path: Path, line: str) -> None:
    assert files(read(tmp_path, f"{line}\nCOPY a.txt /x\n")) == {"/x": "a.txt"}


def test_modes_and_variables(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "FROM debian\nCOPY --chmod=0755 data /x\nCOPY --link --chmod=600 a.txt /y\nENV A=1 B='x y'\nENV C the rest of it\n",
    )
    modes = {placed.path: placed.mode for placed in found.files}
    assert modes == {"/x": 0o755, "/x/d.txt": 0o755, "/x/deep": 0o755, "/x/deep/e.txt": 0o755, "/y": 0o600}
    assert found.variables == {"A": "1", "B": "x y", "C": "the rest of it"}
    found = read(tmp_path, "FROM debian\nENV A=1\\\n2 B=C:\\\\\nENV C=3\n")
    assert found.variables == {"A": "12", "B": "C:\\", "C": "3"}


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (f"FROM --platform={OTHER} debian", f"{OTHER} is not this machine's"),
        ("FROM --pull=always debian", "expected an image"),
        ("FROM debian AS", "expected an image"),
        ("FROM debian AS a AS b", "expected an image"),
        ("FROM debian@sha256:0123456789abcdef", "digest"),
        (f"FROM python:{HERE}@sha256:0123 AS x", "digest"),
        ("FROM alpine AS base", "the image is alpine"),
        ("FROM python:3.7 AS base", "this machine's Python"),
        ("FROM $BASE", "image is \\$BASE"),
        ("FROM debian AS a\nFROM a", "several stages"),
        ("FROM debian\nCOPY --from=a /x /y", "another stage or image"),
        ("FROM debian\nCOPY --parents data /y", "--parents is not read"),
        ("FROM debian\nCOPY --exclude=*.md . /y", "--exclude is not read"),
        ("FROM debian\nCOPY --chmod=u+x a.txt /y", "octal"),
        ("FROM debian\nCOPY --chmod=17777 a.txt /y", "octal"),
        ("FROM debian\nCOPY --chmod a.txt /y", "octal"),
        ("FROM debian\nCOPY --link a.txt /opt", "--link .* directory /opt"),
        ("FROM debian\nWORKDIR /app\nCOPY --link a.txt /app", "--link .* directory /app"),
        ("FROM debian\nCOPY a.txt", "a destination"),
        ("FROM debian\nCOPY a.txt b.txt /x", "end with a slash"),
        ("FROM debian\nCOPY [ab].txt /x", "several files match"),
        ("FROM debian\nCOPY [ab.txt /x", "no pattern"),
        ("FROM debian\nCOPY [z-a].txt /x", "no pattern"),
        ("FROM debian\nCOPY *.rs /x/", "no such file"),
        ("FROM debian\nCOPY a.txt/ /x/\nCOPY a.txt/b /x/", "no such file"),
        ('FROM debian\nCOPY ["a.txt", 7]', "list of strings"),
        ('FROM debian\nCOPY "a b.txt" /x/', "quotation"),
        ("FROM debian\nCOPY a.txt $X", "variables"),
        ("FROM debian\nCOPY <<EOF /x\nEOF", "heredocs"),
        ("FROM debian\nCOPY a.txt /x\nCOPY b.txt /x/y", "/x is a file"),
        ("FROM debian\nCOPY a.txt /x\nCOPY data /x", "/x is a file already"),
        ("FROM debian\nCOPY a.txt /x\nWORKDIR /x", "/x is a file already"),
        ("FROM debian\nCOPY data /x/d.txt\nCOPY data /x", "/x/d.txt is a directory already"),
        ("FROM debian\nCOPY a.txt /home/ubuntu", "directory in some images"),
        ("FROM debian\nCOPY a.txt /x/../etc/passwd", "/etc/passwd"),
        ("FROM debian\nCOPY a.txt //usr/bin/x", "/usr/bin/x"),
        ("FROM debian\nWORKDIR '/app", "quotation"),
        ("FROM debian\nWORKDIR", "a directory"),
        ("FROM debian\nENV A", "NAME=VALUE"),
        ("FROM debian\nENV =x", "NAME=VALUE"),
        ("FROM debian\nARG X", "ARG X"),
        ("# escape=`\nFROM debian", "escape"),
    ],
)  # fmt: skip
def test_what_needs_docker_is_refused_with_its_reason(tmp_path: Path, lines: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)environment/Dockerfile.*{why}"):
        read(tmp_path, lines)


@pytest.mark.parametrize("name", [".dockerignore", "Dockerfile.dockerignore"])
def test_lists_of_what_is_left_out_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("a.txt")
    with pytest.raises(ValueError, match=name):
        read(tmp_path, "FROM debian\nCOPY . /x")


def test_a_directorys_own_files_go_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("root")
    with pytest.raises(ValueError, match="/etc"):
        read(tmp_path, "FROM debian\nCOPY . /")


def test_a_link_that_is_named_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("data/d.txt")
    assert files(read(tmp_path, "FROM debian\nCOPY link /x/")) == {"/x/link": "data/d.txt"}
    (tmp_path / "out").symlink_to("/etc/passwd")
    with pytest.raises(ValueError, match="leads out"):
        read(tmp_path, "FROM debian\nCOPY out /x/")
