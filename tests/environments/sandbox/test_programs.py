"""Small programs of the kinds that people write, by the sandbox and by `python program.py`: both do the same.

`programs.txt` has them, each below its name. One that `reads` or `writes` leaves or is given the text `data`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.environments.sandbox.python_sandbox import Sandbox

pytestmark = pytest.mark.slow

INPUTS = {"lines": "3 4\n5\n", "other lines": "é ü 漢字\r\n\U0001f600 ß", "nothing": ""}
ODD = {
    "carriage returns": "print('a')\r\nif True:\r\n    print('''b\r\nc''')\r\n",
    "a byte order mark": "\ufeffprint(1)",
    "tabs": "if True:\n\tprint('tab')",
    "a form feed": "\x0cprint('page')",
}
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}

DIFFERENT = {
    "raise KeyboardInterrupt": (("", 130), ("", -2)),
    "import os\nprint(os.listdir())": (("[]\n", 0), ("['program.py']\n", 0)),
    "import inspect\nprint(len(inspect.stack()))": (("2\n", 0), ("1\n", 0)),
    "print('\\udcff')": (("\\udcff\n", 0), ("\ufffd\n", 0)),
    "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)": (("", 0), ("", -15)),
    "import os\nprint(os.path.exists('/proc/self/status'), os.getpid() == 1)": (
        ("False True\n", 0),
        ("True False\n", 0),
    ),
    "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(1)'])": (("", 1), ("1\n", 0)),
}
"""What is not the same, by the sandbox and by Python, as docs/environments.md says."""


def programs() -> dict[str, tuple[str, str]]:
    """Returns each program by name, with its input."""
    text = Path(__file__).with_name("programs.txt").read_text(encoding="utf-8")
    found: dict[str, tuple[str, str]] = {name: (code, INPUTS["lines"]) for name, code in ODD.items()}
    for part in ("\n" + text).split("\n=== ")[1:]:
        name, _, code = part.partition("\n")
        match name.split()[0]:
            case "reads":
                found |= {f"{name}: {given}": (f"{code}\nprint([data])", text) for given, text in INPUTS.items()}
            case "writes":
                found[name] = (f"data = '3 4\\n5 é\\n'\n{code}", "")
            case "ends":
                found[name] = (f"print('before')\n{code}\nprint('after')", "")
            case _:
                found[name] = (code, INPUTS["lines"])
    return found


def by_python(directory: Path, code: str, given: str) -> tuple[tuple[str, int], str]:
    """Returns output and exit code of `python program.py`, and its errors."""
    directory.mkdir()
    (directory / "program.py").write_bytes(code.encode())
    command = [sys._base_executable, "program.py"]  # type: ignore[attr-defined]
    done = subprocess.run(
        command, input=given.encode(), capture_output=True, cwd=directory, env=ENVIRONMENT, check=False
    )
    return (done.stdout.decode(errors="replace"), done.returncode), done.stderr.decode(errors="replace")


async def both(sandbox: Sandbox, directory: Path, code: str, given: str) -> list[tuple[tuple[str, int | None], str]]:
    """Returns output and exit code, and the last line of the errors, by the sandbox and by Python."""
    result = await sandbox.run(code, given, seconds=60)
    (found, errors) = await asyncio.to_thread(by_python, directory, code, given)
    return [
        (said, (text.strip().splitlines() or [""])[-1])
        for said, text in (((result.stdout, result.exit_code), result.stderr), (found, errors))
    ]


async def test_a_program_does_what_it_does_by_python(tmp_path: Path) -> None:
    cases = programs()
    assert len(cases) >= 300
    sandbox = Sandbox(at_once=2, output_bytes=1 << 22)
    places = asyncio.Semaphore(len(os.sched_getaffinity(0)))

    async def differs(number: int, name: str) -> str | None:
        async with places:
            ours, pythons = await both(sandbox, tmp_path / str(number), *cases[name])
        return None if ours == pythons else f"{name}: {ours!r:.300}; by Python: {pythons!r:.300}"

    await sandbox.start()
    found = await asyncio.gather(*(differs(number, name) for number, name in enumerate(cases)))
    await sandbox.close()
    assert not list(filter(None, found))


@pytest.mark.parametrize("code", DIFFERENT)
async def test_what_differs_is_documented(sandbox: Sandbox, tmp_path: Path, code: str) -> None:
    ours, pythons = await both(sandbox, tmp_path / "files", code, "")
    assert (ours[0], pythons[0]) == DIFFERENT[code]
