"""What a hostile program tries to get out of the sandbox, and what it gets."""

from __future__ import annotations

import os

import pytest

from counterpoint.environments.sandbox.python_sandbox import Sandbox
from counterpoint.environments.sandbox.seccomp import filter_program
from counterpoint.transport.process.launch import descendants

pytestmark = pytest.mark.slow

SYSCALL = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"

REFUSED = {
    "a socket": "import socket; socket.socket(socket.AF_INET)",
    "a unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "a raw socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "fork": "import os; os.fork()",
    "spawn": "import os; os.posix_spawn('/usr/bin/env', ['env'], {})",
    "a process by vfork": "import subprocess; subprocess.run(['/bin/sh'])",
    "exec": "import os, sys; os.execv('/proc/self/exe', ['python'])",
    "a pool": "import multiprocessing; multiprocessing.Process(target=print).start()",
    "the machine's passwords": "open('/etc/shadow')",
    "the machine's users": "open('/etc/passwd')",
    "its environment": "open('/proc/self/environ')",
    "its parent's memory": "open('/proc/1/mem', 'rb')",
    "the root": "open('/new', 'w')",
    "the library": "open('/usr/lib/new', 'w')",
    "the interpreter": "import os; open(os.__file__, 'a')",
    "a device": "import os, stat; os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0))",
    "chroot": "import os; os.chroot('.')",
    "root again": "import os; os.setuid(0) if os.getuid() else os.setuid(1)",
    "memory in a file": "import os; os.memfd_create('hidden')",
    "more open files": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1 << 16, 1 << 16))",
    "the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0)",
}


@pytest.mark.parametrize("attempt", REFUSED.values(), ids=REFUSED.keys())
async def test_what_is_refused(sandbox: Sandbox, attempt: str) -> None:
    result = await sandbox.run(
        f"try:\n    {attempt}\nexcept (OSError, ValueError) as error:\n    print('refused', error)\nelse:\n    print('done')",
        seconds=60,
    )
    assert result.stdout.startswith("refused"), result


@pytest.mark.parametrize(
    "call",
    [
        "unshare(0x10000000)",
        "setns(0, 0)",
        "ptrace(16, 1, 0, 0)",
        "mount(b'none', b'/tmp', b'tmpfs', 0, None)",
        "umount2(b'/tmp', 2)",
        "shmget(1, 4096, 0o1600)",
        "msgget(1, 0o1600)",
        "personality(0x0040000)",
        "clone(0, 0, 0x10000000 | 17, 0)",
        "syscall(ctypes.c_long(101), 16, 1, 0, 0)" if os.uname().machine == "x86_64" else "ptrace(16, 1, 0, 0)",
    ],
)
async def test_system_calls_that_are_refused(sandbox: Sandbox, call: str) -> None:
    result = await sandbox.run(f"{SYSCALL}print(libc.{call}, ctypes.get_errno())", seconds=60)
    assert result.stdout in ("-1 1\n", "-1 22\n"), result  # The C library refuses a clone without a stack by itself.


async def test_another_architecture_s_system_calls_kill(sandbox: Sandbox) -> None:
    result = await sandbox.run(f"{SYSCALL}libc.syscall(ctypes.c_long(0x40000000 + 39))\nprint('done')", seconds=60)
    assert result.killed == "signal 31 (Bad system call)"


async def test_it_sees_nothing_of_the_machine(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import os, sys
print(sorted(os.environ), os.getppid(), os.listdir('/tmp'), os.path.exists('/proc/1'), os.path.exists('/sys/kernel'))
print(os.path.exists('/work'), os.path.exists('/home'), os.path.exists('/var'))
print([name for name in sys.modules if name.startswith('environments')], sys.path[0].endswith('.zip'))
"""
    monkeypatch.setenv("SECRET", "sesame")
    result = await sandbox.run(code, seconds=60)
    assert result.stdout.splitlines() == [
        "['HOME', 'LANG', 'PATH', 'PYTHONHASHSEED'] 0 [] False False",
        "False False False",
        "[] True",
    ], result


async def test_this_project_is_not_there(sandbox: Sandbox) -> None:
    code = f"import os; print(os.path.exists({__file__!r}))\nimport transport"
    result = await sandbox.run(code, seconds=60)
    assert result.stdout == "False\n"
    assert "No module named 'transport'" in result.stderr


async def test_signals_reach_nobody(sandbox: Sandbox) -> None:
    code = f"""
import os, signal
for pid in [{os.getpid()}, {os.getppid()}, 2, 3, -1, os.getppid() or -1]:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        print(type(error).__name__)
"""
    result = await sandbox.run(code, seconds=60)
    assert set(result.stdout.split()) == {"ProcessLookupError"}, result
    assert (await sandbox.run("print(1)", seconds=60)).ok


async def test_no_descriptor_is_inherited(sandbox: Sandbox) -> None:
    code = """
import os
for descriptor in range(3, 1024):
    try:
        print(descriptor, os.fstat(descriptor))
    except OSError:
        pass
"""
    result = await sandbox.run(code, seconds=60)
    assert (result.stdout, result.exit_code) == ("", 0)


async def test_threads_are_bounded(sandbox: Sandbox) -> None:
    code = f"""
import os, threading, time
threading.stack_size(32768)
started = 0
try:
    while started < {sandbox._settings["threads"]}:
        threading.Thread(target=time.sleep, args=[1000]).start()
        started += 1
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""
    assert (await sandbox.run(code, seconds=60)).stdout == "can't start new thread\n"


async def test_nothing_is_left_of_threads_that_never_end(sandbox: Sandbox) -> None:
    code = """
import threading, time
for _ in range(20):
    threading.Thread(target=time.sleep, args=[1000], daemon=False).start()
print('started', flush=True)
"""
    result = await sandbox.run(code, seconds=1)
    assert result.killed == "deadline"
    assert sandbox._process is not None
    family = [sandbox._process.pid, *descendants(sandbox._process.pid)]
    assert len(family) <= 3  # the process that entered the namespaces, the zygote, and a supervisor that is just ending


def test_the_filter_refuses_by_number_of_each_architecture() -> None:
    for machine in ("x86_64", "aarch64"):
        program = filter_program(machine)
        assert len(program) % 8 == 0
        assert len(program) // 8 < 4096
