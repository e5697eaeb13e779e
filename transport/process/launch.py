"""The guardian of one worker: a small process between the supervisor and a command, after which no process is left.

It runs as a script, on its own (`python -I -S launch.py PARENT_PID NICE NOTIFIES COMMAND...`), and imports only the
standard library, so that it costs some 10 MB and a few milliseconds. It starts the command in a process group of its own and
waits. It passes SIGTERM and SIGINT on to the command. On SIGHUP, which the kernel sends when the supervisor dies for any
reason, it kills the command and everything below it. When the command ends, the guardian also kills all processes that the
command left: as a *subreaper* it inherits every orphan below it, even one that began a session. Its exit code is the
command's, or 128 + the signal that ended the command. The command has a temporary directory of its own, which goes with it.
`transport.process.child` is the other end, and `environments.workers` for a worker of an environment.

Unless it `NOTIFIES`, the command does not get the variables by which the supervisor itself is supervised (`SYSTEMD_VARIABLES`):
what is sent to that address would be taken for the supervisor's own. With 1 they are the command's, and the guardian sends the
command's pid there first.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pwd
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

TRACKER_SECONDS = 5.0
"""How long Python's resource trackers may clean up after all other processes were killed."""

TEMPORARY = "cntp-tmp-"
"""How the names of commands' temporary directories begin. `transport.files.own_directory.remove_left` removes those of guardians
that were killed: each holds an `flock` on its own."""

LONGEST_TEMPORARY = 107 - 55
"""Longest path of a temporary directory in which sockets get paths that the kernel takes: vLLM's have 37 characters below it."""

SHARED_TMPDIR = "X_SHARED_TMPDIR"
"""The variable with the temporary directory that is nobody's own, for what processes of a job must find there."""

SYSTEMD_VARIABLES = frozenset({"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"})
"""Variables by which systemd, or a keeper of `cluster`, supervises a process; none is for its children."""

COMMAND_NOT_STARTED = 127
"""Exit code when the command could not be executed, as in a shell."""


def guarded(command: Sequence[str], nice: int = 0, *, notifies: bool = False) -> list[str]:
    """Returns the command that runs `command` under a guardian which dies with this process.

    Only what `notifies` finds in the environment that it is given the address to which it sends its notifications.
    """
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(nice), f"{notifies:d}", *command]


def exit_code_of(status: int) -> int:
    """Returns the exit code of a process by what `os.waitpid` returned: 128 + signal for one that was killed."""
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


class TemporaryDirectory:
    """A command's own temporary directory, for as long as this process lives."""

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        """Makes it below the one of the environment, in which it is then named. None is made where that one's path is too long.

        Raises `OSError`.
        """
        parent = environment.get("TMPDIR") or "/tmp"
        self.path = ""
        environment.setdefault(SHARED_TMPDIR, parent)
        environment.setdefault("RAY_TMPDIR", environment[SHARED_TMPDIR])  # where `ray.init()` looks for a cluster
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", _compiled(environment))
        if len(os.fsencode(parent)) + 1 + len(TEMPORARY) + 8 > LONGEST_TEMPORARY:
            return
        while not self.path:
            path = f"{parent}/{TEMPORARY}{os.urandom(4).hex()}"
            os.mkdir(path, 0o700)
            # Until it is locked, another process may take it for abandoned.
            try:
                self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                continue
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.path.exists(path):
                self.path = environment["TMPDIR"] = path
            else:
                os.close(self._lock)

    def remove(self) -> None:
        """Removes it with all that is in it."""
        if self.path:
            import shutil  # at the end, and not in each guardian for all its life

            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self.path = ""


def _compiled(environment: MutableMapping[str, str]) -> str:
    """Returns where torch keeps what it compiled by default; the next process has a use for it."""
    try:
        user = environment.get("LOGNAME") or pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container's user may have no name
        user = f"uid_{os.getuid()}"
    return f"{environment[SHARED_TMPDIR]}/torchinductor_{user}"


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {argument}): {os.strerror(error)}")


def become_subreaper() -> None:
    """Makes this process the parent of every orphan below it, which it then has to `reap`.

    Call it from the main thread. Linux only; raises `OSError` where the kernel refuses.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        # It was inherited: the kernel would reap the child, and its exit code would be lost.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int, parent: int) -> None:
    """Asks the kernel to send this process `signal_number` when its parent ends.

    The parent ends, for the kernel, with the thread that started this process. An exec preserves the request. The signal is
    sent at once if `parent` is no longer the parent, since it ended before this call. Linux only; raises `OSError` where the
    kernel refuses.
    """
    _prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def descendants(root: int) -> list[int]:
    """Returns every process below `root`, from `/proc`, zombies excluded."""
    return _below(root, _children())


def live_processes() -> list[tuple[int, str, int, int]]:
    """Returns pid, state (proc_pid_stat(5)), parent and process group of every process of which a thread lives.

    A process whose first thread alone has ended is shown as a zombie, too, as one that was killed is while its threads end.
    """
    found: list[tuple[int, str, int, int]] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                state, parent, group, *others = file.read().rpartition(")")[2].split()[:18]
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is hidden from us
            continue
        if state != "Z" or int(others[-1]) > 1:
            found.append((int(entry), state, int(parent), int(group)))
    return found


def _children() -> dict[int, list[int]]:
    """Returns the living processes by their parent, as they are now."""
    children: dict[int, list[int]] = {}
    for pid, _, parent, _ in live_processes():
        children.setdefault(parent, []).append(pid)
    return children


def _below(root: int, children: dict[int, list[int]]) -> list[int]:
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(), [])
        found += below
        frontier += below
    return found


def reap() -> list[tuple[int, int]]:
    """Collects every child that has ended, adopted ones too: `(pid, exit code)`, 128 + signal for a killed one."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, exit_code_of(status)))


def kill_descendants(timeout_seconds: float = 10.0) -> list[int]:
    """Does all of `kill_steps`; returns what did not die in time (it sleeps uninterruptibly), or what may not be killed."""
    deadline = time.monotonic() + timeout_seconds
    remaining: list[int] = []
    for left in kill_steps({}):
        remaining = left
        if not left or time.monotonic() > deadline:
            break
        time.sleep(0.005)
    reap()  # what ended before the last look and after the last reaping
    return remaining


def kill_steps(codes: dict[int, int]) -> Iterator[list[int]]:
    """Kills and reaps everything below this process, which must be a subreaper; yields what is left, until nothing is.

    The caller waits a moment after each step. `codes` gets the exit codes by pid. Processes that may not be killed (another
    user's) are not waited for: they are the last that is yielded.

    Python's resource trackers are killed last: each removes the shared memory and the semaphores of the killed processes,
    which would stay in /dev/shm for ever, and then ends by itself.
    """
    refused: set[int] = set()
    trackers_until = time.monotonic() + TRACKER_SECONDS
    while True:
        codes.update(reap())
        remaining = descendants(os.getpid())
        if not set(remaining) - refused:
            codes.update(reap())  # what ended before this look and after the last reaping
            yield remaining
            return
        others = [pid for pid in remaining if pid not in refused and not is_resource_tracker(pid)]
        if others:
            trackers_until = time.monotonic() + TRACKER_SECONDS
        victims = remaining if time.monotonic() > trackers_until else others
        refused |= {pid for pid in victims if not _send(pid, signal.SIGKILL)}
        yield remaining


def kill_orphans(guardians: Sequence[int]) -> None:
    """Kills what killed guardians left: everything below this subreaper but `guardians` and their descendants.

    The ports and the memory of their workers are needed again.
    """
    kill_all(orphans(guardians))


def kill_all(pids: Iterable[int]) -> None:
    """Kills those of the processes that live and that this process may kill."""
    for pid in pids:
        _send(pid, signal.SIGKILL)


def orphans(guardians: Sequence[int]) -> set[int]:
    """Returns everything below this subreaper but `guardians` and their descendants."""
    children = _children()  # once: a child that a worker starts between two reads would seem to be an orphan
    guarded = {pid for guardian in guardians for pid in (guardian, *_below(guardian, children))}
    return set(_below(os.getpid(), children)) - guarded


def _send(pid: int, number: int) -> bool:
    """Sends a signal; returns whether this process may. The other may have ended meanwhile."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return True
    except PermissionError:  # another user's, as below `sudo`
        return False
    return True


def is_resource_tracker(pid: int) -> bool:
    """Whether the process removes the shared memory and semaphores of Python processes that have ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"from multiprocessing.resource_tracker import main" in file.read()
    except (FileNotFoundError, ProcessLookupError):  # it ended while we looked
        return False


def lower_priority(nice: int) -> None:
    """Adds to the niceness of all threads below this process. What the system does not let us change keeps its own."""
    for pid in descendants(os.getpid()):
        try:
            threads = [int(thread) for thread in os.listdir(f"/proc/{pid}/task")]
        except FileNotFoundError:  # it has ended
            continue
        for thread in threads:
            try:
                os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + nice)
            except OSError:  # it has ended, or a filter of system calls refuses, such as systemd's `~@resources`
                continue


def execute(command: list[str], nice: int, guardian: int) -> None:
    """Becomes the command, in a child that `guardian` has just forked, and that dies with it. Never returns."""
    try:
        # A process group, not a session: the kernel shares the CPU among sessions first (autogroup), and a nice value counts
        # within one only.
        os.setpgid(0, 0)
        os.nice(nice)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and an ignored signal survives exec
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent(signal.SIGKILL, guardian)
        _announce()  # here, so that the supervisor knows the pid before anything that the command says
        os.execvp(command[0], command)
    except OSError as error:
        _log(f"cannot start {command[0]!r}: {error.strerror}")
    finally:
        os._exit(COMMAND_NOT_STARTED)


def _announce() -> None:
    """Sends the supervisor this process's pid, as that of the worker's main process: systemd's `MAINPID`."""
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(ConnectionRefusedError):
            sender.sendto(f"MAINPID={os.getpid()}".encode(), "\0" + address[1:] if address.startswith("@") else address)


def alive_clock() -> float:
    """Returns seconds by a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def guard(command: list[str] | Callable[[int], object], nice: int, parent: int) -> int:
    """Runs `command` as the module describes; returns its exit code.

    A function is called with this process's pid in a fork of it, which that ends, or which ends with 1.
    """
    watched = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    become_subreaper()
    die_with_parent(signal.SIGHUP, parent)
    temporary: TemporaryDirectory | None = None
    try:
        temporary = TemporaryDirectory(os.environ)
    except OSError as error:  # such as a full disk
        _log(f"there is no temporary directory for the command alone: {error}")
    try:
        return _attend(command, nice, watched)
    finally:
        if temporary is not None:
            temporary.remove()


def _attend(command: list[str] | Callable[[int], object], nice: int, watched: set[signal.Signals]) -> int:
    """Runs the command, and leaves no process below this one; returns the exit code."""
    guardian = os.getpid()
    worker = os.fork()
    if worker == 0:
        if not callable(command):
            execute(command, nice, guardian)
        try:
            command(guardian)  # type: ignore[operator]  # `execute` does not return
        finally:
            os._exit(1)
    while True:
        number = signal.sigwait(watched)
        if number == signal.SIGHUP:
            _kill_leftovers()
            return 128 + signal.SIGKILL
        codes = dict(reap())  # before forwarding, so that a signal never goes to a recycled pid
        if worker in codes:
            _kill_leftovers()
            return codes[worker]
        if number != signal.SIGCHLD:
            _send(worker, number)


def _kill_leftovers() -> None:
    """Kills the remaining processes, and names in the worker's log those that cannot be killed."""
    if left := kill_descendants():
        _log(f"cannot kill what the worker left behind: process {', '.join(map(str, left))}")


def _log(line: str) -> None:
    """Writes a line to the worker's log, if that can be written: a full disk must not change how the guardian ends."""
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode())


if __name__ == "__main__":
    if sys.argv[3] != "1":
        for name in SYSTEMD_VARIABLES:
            os.environ.pop(name, None)
    sys.exit(guard(sys.argv[4:], int(sys.argv[2]), int(sys.argv[1])))
