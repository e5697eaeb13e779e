"""Programs in the sandbox run as programs do, within their bounds."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from counterpoint.environments.sandbox import python_sandbox
from counterpoint.environments.sandbox.python_sandbox import Result, Sandbox, SandboxUnavailable

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "exit_code"),
    [
        ("print(1 + 1)", "2\n", "", 0),
        ("print(input()[::-1])", "cba\n", "", 0),
        ("import sys; sys.exit(3)", "", "", 3),
        ("raise SystemExit('no')", "", "no\n", 1),
        (
            "def f():\n    1 / 0\nf()",
            "",
            "line 2, in f\n    1 / 0\n    ~~^~~\nZeroDivisionError: division by zero\n",
            1,
        ),
        ("def f(:", "", "SyntaxError: invalid syntax\n", 1),
        ("print('\\udcff')", "\\udcff\n", "", 0),
        ("if __name__ == '__main__': print('main')", "main\n", "", 0),
        ("import asyncio\nasyncio.run(asyncio.sleep(0))\nprint('slept')", "slept\n", "", 0),
        ("import threading\nthreading.Thread(target=print, args=['thread']).start()", "thread\n", "", 0),
        ("import atexit\natexit.register(print, 'bye')", "bye\n", "", 0),
        ("open('a', 'w').write('b'); print(open('/tmp/a').read())", "b\n", "", 0),
        (
            "import ctypes, hashlib, json, sqlite3, zoneinfo; print(sqlite3.connect(':memory:') is None)",
            "False\n",
            "",
            0,
        ),
        ("print({'a', 'b', 'c', 'd'} == set('abcd'), hash('a') == hash('a'))", "True True\n", "", 0),
    ],
)
async def test_programs(sandbox: Sandbox, code: str, stdout: str, stderr: str, exit_code: int) -> None:
    result = await sandbox.run(code, stdin="abc\n", seconds=60)
    assert (result.stdout, result.exit_code, result.killed) == (stdout, exit_code, "")
    assert result.stderr.endswith(stderr)
    assert (result.stderr == "") == (stderr == "")
    assert result.ok == (exit_code == 0)


@pytest.mark.parametrize(
    ("code", "seconds", "killed"),
    [
        ("while True: pass", 0.3, "deadline"),
        ("import time\ntime.sleep(1000)", 0.3, "deadline"),
        ("import signal, time\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\n"
         "time.sleep(1000)", 0.3, "deadline"),
        ("while True: print('x' * 1000)", 60, "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", 60, "output"),
        ("import ctypes\nctypes.string_at(0)", 60, "signal 11 (Segmentation fault)"),
    ],
)  # fmt: skip
async def test_programs_that_are_killed(sandbox: Sandbox, code: str, seconds: float, killed: str) -> None:
    result = await sandbox.run(code, seconds=seconds)
    assert (result.killed, result.exit_code, result.ok) == (killed, None, False)
    assert len(result.stdout) <= 1 << 16
    assert len(result.stderr) <= 1 << 16


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        ("x = bytearray(10 ** 10)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(10 ** 6))", "MemoryError"),
        ("open('a', 'w').write('a' * 10 ** 8)", "File too large"),
        ("for n in range(100): open(str(n), 'w').write('a' * 10 ** 6)", "No space left"),
        ("x = [open('/dev/null') for _ in range(1000)]", "Too many open files"),
    ],
)
async def test_bounds(sandbox: Sandbox, code: str, stderr: str) -> None:
    result = await sandbox.run(code, seconds=60, memory_mib=256)
    assert result.exit_code == 1, result
    assert stderr in result.stderr


async def test_input_that_nobody_reads_and_output_of_both_streams(sandbox: Sandbox) -> None:
    result = await sandbox.run("import sys; print('out'); print('err', file=sys.stderr)", stdin="x" * 10**6, seconds=60)
    assert result == Result("out\n", "err\n", 0, "", result.seconds)
    echoed = await sandbox.run("import sys; print(len(sys.stdin.read()))", stdin="x" * 10**6, seconds=60)
    assert echoed.stdout == "1000000\n"


async def test_many_runs_at_once_do_not_meet(sandbox: Sandbox) -> None:
    code = "import os, random\nprint(os.listdir('.'), random.random())\nopen('mine', 'w')"
    results = await asyncio.gather(*(sandbox.run(code, seconds=60) for _ in range(8)))
    assert all(result.stdout.startswith("[] ") for result in results)
    assert len({result.stdout for result in results}) == 8


async def test_a_cancelled_run_is_killed_and_others_go_on(sandbox: Sandbox) -> None:
    runs = [asyncio.create_task(sandbox.run("import time\ntime.sleep(1000)", seconds=1000)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting = asyncio.create_task(sandbox.run("print(1)", seconds=60))
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)
    assert (await waiting).ok


async def test_a_killed_zygote_is_started_anew(sandbox: Sandbox) -> None:
    assert (await sandbox.run("print(1)", seconds=60)).ok
    assert sandbox._process is not None
    os.kill(sandbox._process.pid, signal.SIGKILL)
    await sandbox._process.wait()
    assert (await sandbox.run("print(1)", seconds=60)).ok


async def test_packages_may_be_imported(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/shared.py").write_text("value = 7\n")
    (tmp_path / "secret.py").write_text("value = 8\n")
    sandbox = Sandbox(packages=[tmp_path / "mine"])
    try:
        result = await sandbox.run("import shared; print(shared.value)\nimport secret", seconds=60)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    finally:
        await sandbox.close()
    assert result.stdout == "7\n"
    assert "No module named 'secret'" in result.stderr


async def test_a_machine_without_user_namespaces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> None:
        raise SandboxUnavailable(python_sandbox._advice("unshare(user): No space left on device"))

    monkeypatch.setattr(python_sandbox, "map_users", refuse)
    sandbox = Sandbox()
    with pytest.raises(SandboxUnavailable, match=r"user\.max_user_namespaces"):
        await sandbox.run("print(1)")
    await sandbox.close()


async def test_an_old_or_strange_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.uname()
    for release, machine, said in (("4.4.0-1", real.machine, "Linux 5.14 or newer"), (real.release, "s390x", "s390x")):
        system = os.uname_result((real.sysname, real.nodename, release, real.version, machine))
        monkeypatch.setattr(os, "uname", lambda system=system: system)
        with pytest.raises(SandboxUnavailable, match=said):
            await Sandbox().start()


async def test_without_protection_only_by_name() -> None:
    with pytest.raises(ValueError, match="'namespaces' or 'none'"):
        Sandbox("off")  # type: ignore[arg-type]
    sandbox = Sandbox("none")
    result = await sandbox.run("import os; print(os.getcwd(), os.path.exists('/proc/1'))", seconds=60)
    await sandbox.close()
    directory, proc = result.stdout.split()
    assert proc == "True"
    assert not os.path.exists(directory)  # noqa: ASYNC240


async def test_arguments_out_of_range(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="expected a time"):
        await sandbox.run("", seconds=0)
    with pytest.raises(ValueError, match="64 or more MiB"):
        await sandbox.run("", memory_mib=1)
    assert "longer than" in (await sandbox.run("#" * (2 << 20))).stderr
