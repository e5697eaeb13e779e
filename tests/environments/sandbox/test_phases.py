"""What a phase of a box makes of the box, and what the next one, where tests run, sees of it: as root, and without.

Without root, commands have the user that owns all that the builder makes.
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from counterpoint.environments.sandbox.box import Box, BoxLost, Ran, box_variables
from counterpoint.environments.sandbox.builder import DIRECTORIES, SYSTEM, TESTS_HOME
from counterpoint.environments.sandbox.phase import PYTHON
from counterpoint.environments.sandbox.seccomp import filter_program

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("users")]


async def run(box: Box, command: str) -> Ran:
    return await box.run(["/bin/bash", "-c", command], box_variables(), "/", seconds=60.0)


async def both(before: str, later: str, aside: tuple[str, ...] = ()) -> str:
    """Runs a command in a phase, and another one in the next; returns what the second says."""
    async with Box(16, 256) as box:
        await box.begin()
        await run(box, before)
        await box.end()
        await box.renew(aside)
        await box.begin()
        return (await run(box, later)).output


FORGED = "for d in /app /root; do mkdir -p $d/fd; printf forged > $d/fd/63; printf forged > $d/stdin; done; "
UNTOUCHED = {
    "a directory of descriptors": (f"{FORGED} rm /dev/fd; cd /root; mv fd /dev/fd", "cat <(echo true)", "true\n"),
    "a link to descriptors": (f"{FORGED} ln -sfn /app/fd /dev/fd; mv /dev/fd /dev/f", "cat <(echo true)", "true\n"),
    "standard input": (f"{FORGED} ln -sf /app/stdin /dev/stdin; rm /dev/stdin", "echo true | cat /dev/stdin", "true\n"),
    "standard output": ("ln -sf /app/out /dev/stdout; rm -f /dev/stdout", "echo true > /dev/stdout", "true\n"),
    "a device": (
        "rm -f /dev/null; mv /dev/zero /dev/null; chmod 0 /dev/zero /dev/urandom",
        "head -c 3 /dev/zero | wc -c; cat /dev/null",
        "3\n",
    ),
    "devices of its own": (
        "touch /dev/tty /dev/new; mkdir /dev/pts",
        "ls /dev",
        "fd\nfull\nnull\nrandom\nshm\nstderr\nstdin\nstdout\nurandom\nzero\n",
    ),
    "all devices": ("mv /dev /d; rm -rf /dev; mkdir /dev", "stat -c %F /dev/null", "character special file\n"),
    "shared memory": (
        "echo forged > /dev/shm/x; chmod 0 /dev/shm; mv /dev/shm /s",
        "ls /dev/shm | wc -l; echo 1 > /dev/shm/x",
        "0\n",
    ),
    "processes' files": ("mv /proc /p; mkdir /proc", "head -n 1 /proc/self/status", "Name:\thead\n"),
    "names of the machine": (
        "echo root::0:0::/app:/app/sh > /etc/passwd; mv /etc /e; mkdir /etc",
        "id -un 0",
        "root\n",
    ),
    "programs": (
        "for p in /usr /bin /sbin /lib /lib64; do mv $p /x; echo > $p/cat; chmod 0 $p; done",
        "cat <<< true",
        "true\n",
    ),
    "the tests' place": (
        "mv /tests /t; rm -rf /tests; ln -s /app /tests; echo forged > /tests/x; chmod 0 /tests",
        "ls -A /tests; echo 1 > /tests/x",
        "",
    ),
    "the logs' place": (
        "mv /logs /l; rm -rf /logs; ln -s /app /logs; mkdir -p /logs/verifier; chmod 0 /logs",
        "ls /logs",
        "agent\nartifacts\nhome\nverifier\n",
    ),
    "places of files": (
        "mkdir /app; for d in /tmp /var /root /home; do mv $d /app; ln -s /app/fd $d; done",
        "cd /root && touch x /tmp/x /var/tmp/x /home/x && stat -c %F /tmp /var /var/tmp /root | sort -u",
        "directory\n",
    ),
    "closed places": ("chmod 0 /tmp /var/tmp /root /", "mktemp -d > /dev/null && ls / | grep -c tmp", "1\n"),
    "inodes": (
        "mkdir /app; cd /app; python3 -c 'n = 0\nwhile True: open(str(n), \"w\"); n += 1'; rmdir /tmp",
        "echo true > /tmp/x && cat /tmp/x",
        "true\n",
    ),
    "room": ("head -c 100M /dev/zero > /full; rmdir /tmp", "echo true > /tmp/x && cat /tmp/x", "true\n"),
    "the shell's start files": (
        f"for f in bashrc profile bash_profile bash_login; do echo 'echo forged' > ~/.$f; done; ln -s /root {TESTS_HOME}",
        f"export HOME={TESTS_HOME}; bash -lc true; bash -ic true 2> /dev/null; ls -A ~ | wc -l",
        "0\n",
    ),
    "files of a root of projects": (
        "echo 'raise SystemExit(7)' > /conftest.py; mkdir -p /setup.cfg/x",
        "ls -d /conftest.py /setup.cfg 2> /dev/null | wc -l",
        "0\n",
    ),
    "the interpreter's own place": (
        "mkdir -p PYTHON/bin; echo 'echo forged' > PYTHON/bin/python3; chmod +x PYTHON/bin/python3",
        "PYTHON/bin/python3 -c 'print(6 * 7)'",
        "42\n",
    ),
}
"""What the first phase does, what the second looks at, and what it must see."""


@pytest.mark.parametrize(("before", "later", "seen"), UNTOUCHED.values(), ids=UNTOUCHED.keys())
async def test_what_a_phase_runs_through_is_not_the_one_befores(before: str, later: str, seen: str) -> None:
    before, later = (command.replace("PYTHON", sys.base_prefix) for command in (before, later))
    assert await both(before, later, ("conftest.py", "setup.cfg")) == seen


async def test_what_a_phase_leaves_for_the_next_is_there() -> None:
    before = "mkdir /app; echo 1 | tee /app/x /tmp/x ~/x /opt/x /var/lib/x /logs/agent/x /logs/artifacts/x /logs/x"
    later = "cat /app/x /tmp/x ~/x /opt/x /var/lib/x /logs/agent/x /logs/artifacts/x; ls /logs/x 2> /dev/null"
    assert await both(before, later) == "1\n" * 7


async def test_files_are_unpacked_as_they_are_packed() -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, kind, mode in (
            ("app", tarfile.DIRTYPE, 0o755),
            ("app/run", tarfile.REGTYPE, 0o555),
            ("app/link", tarfile.SYMTYPE, 0o777),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.linkname = kind, mode, "/app/run" if kind == tarfile.SYMTYPE else ""
            archive.addfile(member)
    async with Box(16, 256) as box:
        await box.begin()
        await box.unpack(packed.getvalue())
        ran = await run(box, "stat -c '%a %F' /app /app/run; readlink /app/link")
    assert ran.output == "755 directory\n555 regular empty file\n/app/run\n"


@pytest.fixture
def prefix() -> Iterator[str]:
    """A place of an interpreter, whose programs have a link to where commands may write."""
    with tempfile.TemporaryDirectory() as place:
        Path(place, "bin").mkdir()
        Path(place, "bin/tool").symlink_to("/opt/tool/run")
        Path(place).chmod(0o755)
        yield place


async def test_a_link_to_where_commands_write_is_no_program(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "base_prefix", prefix)
    forge = "mkdir /opt/tool; echo 'echo forged' > /opt/tool/run; chmod +x /opt/tool/run; tool > /opt/seen"
    assert await both(forge, "cat /opt/seen; tool 2> /dev/null || echo none") == "forged\nnone\n"


@pytest.mark.parametrize("place", [*SYSTEM, PYTHON])
async def test_places_of_programs_are_there_and_are_not_the_commands(place: str) -> None:
    seen = await both(
        f"mkdir -p {place}; touch {place}/forged; mv {place} /elsewhere; ln -s /app {place}", f"ls {place}/forged"
    )
    assert seen.endswith("No such file or directory\n")


OF_THE_FIRST = {
    "limits": "for w in core cpu data fsize memlock nofile nproc stack as; do prlimit --pid 1 --$w=1:1; done",
    "interrupts": "for s in INT HUP TERM PIPE USR1 XFSZ CHLD SEGV STOP KILL; do kill -$s 1; kill -$s -1; done",
    "shares of a processor": "renice -n 19 -p 1; renice -n 19 -u 0; renice -n 19 -u $(id -u); chrt -i -p 0 1; ionice -c 3 -p 1; "
    "ionice -c 3 -u 0",
}  # fmt: skip


@pytest.mark.parametrize("attempt", OF_THE_FIRST.values(), ids=OF_THE_FIRST.keys())
async def test_the_first_process_is_not_the_commands(attempt: str) -> None:
    look = "cat /proc/1/limits; cut -d ' ' -f 18,19,41 /proc/1/stat; ionice -p 1; taskset -p 1; grep Sig /proc/1/status"
    async with Box(16, 256) as box:
        await box.begin()
        before = await run(box, look)
        await run(box, attempt)
        after = await run(box, look)
    assert before.output.count("\n") > 15
    assert after.output == before.output


async def test_commands_may_set_limits_and_shares_of_their_own() -> None:
    async with Box(16, 256) as box:
        await box.begin()
        ran = await run(
            box,
            "prlimit --pid $$ --nofile=99 && ulimit -n && nice && nice -n 5 nice && taskset -p $$ > /dev/null && yes | head -1",
        )
    files, nice, nicer, answer = ran.output.splitlines()
    assert (files, int(nicer) - int(nice), answer, ran.exit_code) == ("99", 5, "y", 0)


async def test_nothing_says_where_the_machine_has_its_files() -> None:
    async with Box(16, 256) as box:
        await box.begin()
        ran = await run(
            box,
            "cat /proc/1/cmdline /proc/1/environ /proc/1/cgroup /proc/self/cgroup | tr '\\0' '\\n'; readlink /proc/1/*",
        )
    assert not {part for line in ran.output.splitlines() for part in line.split("/")} & {
        *Path(__file__).parts[1:-1],
        *Path(sys.base_prefix).parts[1:],
    }
    assert all(line.endswith(":/") or "denied" in line for line in ran.output.split("\n") if line), ran.output


async def test_the_directories_of_an_image_are_there_and_are_for_files() -> None:
    async with Box(16, 256) as box:
        await box.begin()
        ran = await run(box, f"for d in {' '.join(DIRECTORIES)}; do touch $d/file || echo $d; done")
    assert ran.output == ""


async def test_commands_that_take_all_processes_cost_their_own_rollout() -> None:
    bomb = "for i in $(seq 2000); do sleep 1000 & done 2> /dev/null; wait"
    async with Box(16, 256) as box:
        await box.begin()
        await box.run(["/bin/bash", "-c", bomb], box_variables(), "/", seconds=3.0)
        assert "alive" in (await box.run(["/bin/bash", "-c", "echo alive"], box_variables(), "/", seconds=60.0)).output


@pytest.mark.parametrize("made", ["mkdir", "mkfifo", "ln -s /etc/passwd"])
async def test_what_is_no_file_is_not_read(made: str) -> None:
    async with Box(16, 256) as box:
        await box.begin()
        await run(box, f"{made} /logs/x")
        await box.end()
        with pytest.raises(ValueError, match="/logs/x"):
            await box.read("/logs/x")
        assert await box.read("/logs/y") is None


async def test_a_box_that_is_lost_is_not_told_as_the_machines_fault() -> None:
    async with Box(16, 256) as box:
        await box.begin()
        assert box._process is not None
        box._process.kill()
        with pytest.raises(BoxLost):
            await run(box, "true")
        with pytest.raises(BoxLost, match="closed"):
            await box.end()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_of_commands_is_one_the_kernel_takes(machine: str) -> None:
    assert 0 < len(filter_program(machine, commands=True)) // 8 < 4096
