"""A chat with the built-in models' tokenizer, which needs no weights, and users that start boxes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.sandbox.box import Box
from counterpoint.environments.sandbox.python_sandbox import SandboxUnavailable
from counterpoint.models.tiny_tokenizer import write_tokenizer

NOBODY = 65534


@pytest.fixture(scope="session")
def tokenizer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, longest=1024)
    return directory


@pytest.fixture(scope="session")
def chat(tokenizer_directory: Path) -> Chat:
    return Chat(tokenizer_directory)


def python_of(user: int) -> str:
    """An interpreter that this user may start: that of these tests may lie in root's home. Skips where there is none."""
    for python in (sys._base_executable, "/usr/bin/python3"):  # type: ignore[attr-defined]
        with suppress(OSError, subprocess.CalledProcessError):
            check = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
            subprocess.run(check, check=True, user=user, group=user, cwd="/")
            return str(python)
    pytest.skip("no interpreter that another user may start")


@pytest.fixture(params=["as root", "without root"])
async def users(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Boxes are started by root, and by another user. Skips where the machine confines none.

    This process has the user's rights meanwhile, and may return to its own.
    """
    ours = os.geteuid()
    user = 0 if request.param == "as root" else ours or NOBODY
    if user != ours != 0:
        pytest.skip("this is not root")
    if user != ours:
        python = python_of(user)
        monkeypatch.setattr(sys, "_base_executable", python)
        monkeypatch.setattr(sys, "base_prefix", str(Path(python).parents[1]))
        started_by = partial(asyncio.create_subprocess_exec, user=user, group=user)
        monkeypatch.setattr(asyncio, "create_subprocess_exec", started_by)  # all of its ids are then the user's
        os.setegid(user)
        os.seteuid(user)
    try:
        async with Box(1, 256) as box:
            await box.begin()
        yield
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    finally:
        os.seteuid(ours)
        os.setegid(os.getgid())


@pytest.fixture
def everyones() -> Iterator[Path]:
    """A directory that each of the `users` may read."""
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        yield Path(place)
