"""A program that is kept warm is what it is cold, and nothing of it is left."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway import agent_process
from counterpoint.environments.gateway.agent import AgentEnvironment
from counterpoint.environments.gateway.agent_process import AgentResult, run_agent, started
from counterpoint.environments.gateway.warm import NAMES, NotWarm, WarmProgram
from counterpoint.environments.lifecycle import started as environment_started
from counterpoint.environments.scripted import ScriptedModel
from tests.environments.gateway.test_agent import LEAVES, ONE_CALL, PREAMBLE, _runs
from tests.support.polling import until

pytestmark = pytest.mark.slow

FIXED = {"PATH": os.environ["PATH"], "HOME": "/", "FIXED": "for all"}


class Bench:
    """One program, cold and warm, with the same variables and directory."""

    def __init__(self, directory: Path, code: str, *arguments: str) -> None:
        self.directory = directory
        self.file = directory / "program" / "agent.py"
        self.file.parent.mkdir(exist_ok=True)
        self.write(code)
        self.given = directory / "given"
        self.given.write_text('{"prompt": "x"}\n')
        self.work = directory / "work"
        self.work.mkdir(exist_ok=True)
        self.command = [sys.executable, str(self.file), *arguments]
        self.warm = WarmProgram(self.command, FIXED, None)

    def write(self, code: str, name: str = "agent.py") -> None:
        self.file.with_name(name).write_text(textwrap.dedent(code))

    def variables(self, key: str) -> dict[str, str]:
        return FIXED | {"OPENAI_API_KEY": key, "TMPDIR": str(self.directory)}

    async def run_cold(self, key: str = "key") -> AgentResult:
        return await run_agent(started(self.command, self.variables(key), self.work), self.given)

    async def run_warm(self, key: str = "key") -> AgentResult:
        return await self.warm.run(self.variables(key), self.work, self.given)


@asynccontextmanager
async def bench(directory: Path, code: str, *arguments: str) -> AsyncIterator[Bench]:
    made = Bench(directory, code, *arguments)
    try:
        yield made
    finally:
        await made.warm.close()


REPORT = '''
"""A program that says what it is."""
from __future__ import annotations
import ctypes, helper, json, multiprocessing, os, resource, signal, subprocess, sys, tempfile, threading, warnings
from pathlib import Path

def deathsig():
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(found))
    return found.value

def kinds():
    return {fd: os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in ("0", "1", "2")}

umask = os.umask(0)
os.umask(umask)
opened = os.open("/dev/null", os.O_RDONLY)
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "flags": str(sys.flags), "executable": sys.executable,
    "environment": dict(os.environ), "childs": subprocess.check_output(["env"], text=True).split("\\n"),
    "directory": os.getcwd(), "names": sorted(globals()), "file": __file__, "name": __name__, "doc": __doc__,
    "loader": type(__loader__).__name__, "spec": __spec__, "package": __package__, "main": sys.modules["__main__"].__file__,
    "umask": umask, "limits": [resource.getrlimit(each) for each in range(16)], "descriptors": kinds(),
    "inheritable": [os.get_inheritable(each) for each in range(3)], "opened": opened, "all": len(os.listdir("/proc/self/fd")),
    "signals": [str(signal.getsignal(each)).split(" at ")[0] for each in sorted(signal.valid_signals())],
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "status": [line for line in open("/proc/self/status")
        if line.startswith(("SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Threads"))],
    "session": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
    "guard": os.getsid(os.getppid()) == os.getppid(),
    "death": deathsig(), "nice": os.nice(0), "oom": open("/proc/self/oom_score_adj").read(), "stdin": sys.stdin.read(),
    "streams": [[each.encoding, each.errors, each.line_buffering, each.isatty()] for each in (sys.stdin, sys.stdout, sys.stderr)],
    "temporary": tempfile.gettempdir(), "original": multiprocessing.process.ORIGINAL_DIR, "threads": threading.active_count(),
    "main_thread": threading.current_thread() is threading.main_thread(), "native": threading.get_native_id() == os.getpid(),
    "warnings": [str(each) for each in warnings.filters], "helper": helper.count, "annotations": __annotations__,
}))
helper.count += 1
'''

HELPER = """
import os, tempfile
count = 0
os.environ["SET_BY_IMPORT"] = "1"
os.environ["PATH"] += ":/added"
del os.environ["FIXED"]
tempfile.gettempdir()
"""


async def test_a_program_is_warm_what_it_is_cold(tmp_path: Path) -> None:
    async with bench(tmp_path, REPORT, "one", "two words") as program:
        program.write(HELPER, "helper.py")
        cold = await program.run_cold("a")
        assert cold.exit_code == 0, cold.errors
        for key in ("b", "c"):
            warm = await program.run_warm(key)
            assert warm.exit_code == 0, warm.errors
            expected = json.loads(
                cold.output.replace('"a"', f'"{key}"').replace("OPENAI_API_KEY=a", f"OPENAI_API_KEY={key}")
            )
            found = json.loads(warm.output)
            for each in (expected, found):
                each["childs"] = sorted(each["childs"])
            assert found == expected


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nsys.exit(3)",
        "import sys\nsys.exit('words')",
        "def broken():\n    raise ValueError('words')\n"
        "try:\n    broken()\nexcept ValueError as error:\n    raise KeyError from error",
        "import os\nos.kill(os.getpid(), 9)",
        "import os\nos._exit(4)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)",
        "import atexit, threading, time\natexit.register(print, 'at exit')\n"
        "threading.Thread(target=lambda: (time.sleep(0.05), print('of a thread'))).start()\nprint('first', end='')",
        "import sys\nsys.excepthook = lambda *found: print('hook', found[0])\nraise ValueError",
        "import sys\nsys.stdout.close()",
        "import multiprocessing\ndef of_main(x): return x + 1\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.map(of_main, [1]))",
        "import pickle\nclass Thing: pass\nprint(type(pickle.loads(pickle.dumps(Thing()))) is Thing)",
        "import asyncio\nasync def main():\n    made = await asyncio.create_subprocess_exec('echo', 'said')\n"
        "    print(await made.wait())\nasyncio.run(main())",
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)",
    ],
)
async def test_it_ends_as_it_does_cold(tmp_path: Path, code: str) -> None:
    async with bench(tmp_path, code) as program:
        cold, warm = await program.run_cold(), await program.run_warm()
        if "SIGINT" in code:
            assert (warm.exit_code, warm.errors[-18:]) == (cold.exit_code, cold.errors[-18:])
        else:
            assert warm == cold


async def test_forks_draw_other_random_numbers(tmp_path: Path) -> None:
    code = """
    import numpy.random, random, secrets, tempfile, uuid
    print(random.random(), numpy.random.rand(), secrets.token_hex(), uuid.uuid4(), tempfile.mktemp())
    """
    async with bench(tmp_path, code) as program:
        first, second = [(await program.run_warm()).output.split() for _ in range(2)]
        assert len({*first, *second}) == 10


async def test_two_at_once_share_nothing(tmp_path: Path) -> None:
    code = """
    import helper, os, sys
    helper.seen.append(os.environ["OPENAI_API_KEY"])
    open("/dev/null")
    sys.stdout.write(" ".join([*helper.seen, *sorted(os.listdir("/proc/self/fd"))]))
    sys.stdout.flush()
    os.rename(sys.argv[1] + "/" + helper.seen[0], sys.argv[1] + "/met-" + helper.seen[0])
    while len([name for name in os.listdir(sys.argv[1]) if name.startswith("met")]) < 2: pass
    """
    async with bench(tmp_path, code, str(tmp_path)) as program:
        program.write("seen = []", "helper.py")
        for key in ("a", "b"):
            (tmp_path / key).touch()
        first, second = await asyncio.gather(*map(program.run_warm, ("a", "b")))
        assert (first.exit_code, second.exit_code) == (0, 0), first.errors + second.errors
        assert first.output == "a 0 1 2 3"
        assert second.output == "b 0 1 2 3"


WAITS = """
import os, sys, time
open(sys.argv[1] + "/began", "w").write(f"{os.getppid()} {open(f'/proc/{os.getppid()}/stat').read().split()[3]}")
os.rename(sys.argv[1] + "/began", sys.argv[1] + "/begun")
while not os.path.exists(sys.argv[1] + "/go"): time.sleep(0.01)
print("done")
"""


async def test_the_death_of_a_template_ends_no_rollout(tmp_path: Path) -> None:
    async with bench(tmp_path, WAITS, str(tmp_path)) as program:
        running = asyncio.create_task(program.run_warm())
        await until((tmp_path / "begun").exists, "the program")
        _, template = map(int, (tmp_path / "begun").read_text().split())
        os.kill(template, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert (await program.run_warm()).output == "done\n", "another template serves it"
        assert (await running).output == "done\n"
        _, other = map(int, (tmp_path / "begun").read_text().split())
        assert other != template
    assert not _runs(other)


async def test_the_death_of_a_guard_ends_its_rollout_alone(tmp_path: Path) -> None:
    async with bench(tmp_path, WAITS, str(tmp_path)) as program:
        running = asyncio.create_task(program.run_warm())
        await until((tmp_path / "begun").exists, "the program")
        guard, _ = map(int, (tmp_path / "begun").read_text().split())
        os.kill(guard, signal.SIGKILL)
        assert (await running).exit_code == -signal.SIGKILL
        (tmp_path / "go").touch()
        assert (await program.run_warm()).output == "done\n"


async def test_a_template_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.environments.gateway.agent_process._CLOSE_SECONDS", 0.5)
    async with bench(tmp_path, WAITS, str(tmp_path)) as program:
        (tmp_path / "go").touch()
        await program.run_warm()
        _, template = map(int, (tmp_path / "begun").read_text().split())
        os.kill(template, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await program.run_warm()
        assert (await program.run_warm()).output == "done\n"
        assert not _runs(template)


async def test_a_template_that_takes_no_more_requests_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.environments.gateway.warm._SEND_SECONDS", 0.2)
    async with bench(tmp_path, WAITS, str(tmp_path)) as program:
        (tmp_path / "go").touch()
        await program.run_warm()
        _, template = map(int, (tmp_path / "begun").read_text().split())
        os.kill(template, signal.SIGSTOP)
        control = program.warm._template._control  # type: ignore[union-attr]
        with suppress(TimeoutError):
            while control.send(b"f"):
                pass
        assert (await program.run_warm()).output == "done\n"
        assert not _runs(template)


async def test_a_template_that_ends_while_its_files_are_looked_at_is_replaced(tmp_path: Path) -> None:
    async with bench(tmp_path, "print('done')") as program:
        await program.warm.start()
        template = program.warm._template
        assert template is not None
        loop = asyncio.get_running_loop()
        serves = template.serves

        def ends_then() -> bool:
            found = serves()
            template.retired = True
            asyncio.run_coroutine_threadsafe(template.left(), loop).result()
            return found

        template.serves = ends_then  # type: ignore[method-assign]
        assert (await program.run_warm()).output == "done\n"


@pytest.mark.parametrize("changed", ["agent.py", "helper.py"])
async def test_a_changed_file_is_read_again(tmp_path: Path, changed: str) -> None:
    async with bench(tmp_path, "import helper\nprint('old', helper.word)") as program:
        program.write("word = 'old'", "helper.py")
        assert (await program.run_warm()).output == "old old\n"
        code = program.file.with_name(changed).read_text()
        program.write(code.replace("'old'", "'newer'"), changed)
        assert (await program.run_warm()).output == (await program.run_cold()).output
        assert "newer" in (await program.run_warm()).output


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import no_such_module_here", "importing no_such_module_here failed: ModuleNotFoundError"),
        (
            "import helper  # threading.Thread(target=threading.Event().wait, name='a poller', daemon=True).start()",
            "'a poller'",
        ),
        (
            "import helper  # import ctypes; libc = ctypes.CDLL(None); libc.pthread_create("
            "ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(libc.pause, ctypes.c_void_p), None)",
            "importing helper started the thread",
        ),
        ("import helper  # raise SystemExit('not today')", "importing helper failed: SystemExit: not today"),
        ("import helper  # os.environ.get('OPENAI_API_KEY')", "importing helper reads or sets OPENAI_API_KEY"),
        ("import helper  # os.environ.setdefault('OPENAI_BASE_URL', 'http://elsewhere')", "sets OPENAI_BASE_URL"),
        ("import helper  # os.putenv('X', '1'); os.environ['ANTHROPIC_API_KEY'] = 'mine'", "sets ANTHROPIC_API_KEY"),
        ("import helper  # os.kill(os.getpid(), 9)", "it ended"),
        ("import helper  # os.write(2, b'broken'); os._exit(0)", "it ended: broken"),
        ("import helper  # open(os.path.join(os.path.dirname(__file__), 'socket.py'), 'w')", ""),
        ("import (", "agent.py cannot be read"),
        ("a = '\0'", "agent.py cannot be read"),
    ],
)
async def test_what_must_not_be_forked_is_refused(tmp_path: Path, code: str, why: str) -> None:
    async with bench(tmp_path, code) as program:
        program.write("import os, threading\n" + code.partition("# ")[2], "helper.py")
        if not why:
            await program.warm.start()
            program.write(code + "\n")
            why = "socket.py has the name of a module"
        with pytest.raises(NotWarm, match=f"warm = true: {program.file} cannot be kept warm: .*{why}"):
            await program.run_warm()


async def test_a_template_that_ends_before_it_forks_says_why(tmp_path: Path) -> None:
    async with bench(tmp_path, "import helper") as program:
        program.write(
            "import os\nos.register_at_fork(before=lambda: os._exit(os.write(2, b'no fork today')))", "helper.py"
        )
        with pytest.raises(NotWarm, match="does not fork: no fork today"):
            await program.run_warm()


async def test_a_library_that_stops_its_threads_before_a_fork_is_taken(tmp_path: Path) -> None:
    async with bench(
        tmp_path, "import numpy\nprint((numpy.ones((300, 300)) @ numpy.ones((300, 300)))[0, 0])"
    ) as program:
        assert (await program.run_warm()).output == "300.0\n"


async def test_what_clients_import_at_their_first_use_is_imported(tmp_path: Path) -> None:
    template = Path(agent_process.__file__).with_name("agent_template.py").read_text()
    statement = next(each for each in ast.parse(template).body if "LATER" in ast.unparse(each)[:5])
    later = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
    expected = sorted({module for modules in later.values() for module in modules})
    code = f"import openai, anthropic, httpx, sys\nprint(*sorted({expected!r} & sys.modules.keys()))"
    async with bench(tmp_path, code.replace("[", "{").replace("]", "}")) as program:
        result = await program.run_warm()
        assert result.output.split() == expected, result.errors


async def test_own_code_runs_in_rollouts_only(tmp_path: Path) -> None:
    """Imports behind it, too, which it may have prepared."""
    code = "import os\nos.environ['MODE'] = 'set'\nimport helper\nprint(helper.mode, os.getpid() == helper.pid)"
    async with bench(tmp_path, code) as program:
        program.write("import os\nmode, pid = os.environ['MODE'], os.getpid()", "helper.py")
        assert (await program.run_warm()).output == "set True\n"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["sh", "-c", "true"], "bin/sh'"),
        ([sys.executable], r"\[\]"),
        ([sys.executable, "-c", "print(1)"], "'-c'"),
        ([sys.executable, "-m", "package"], "'-m'"),
        ([sys.executable, "-u", __file__], "'-u'"),
        ([sys.executable, "no-such-file.py"], "no-such-file.py"),
    ],
)
def test_other_forms_are_refused_by_name(command: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=f"warm = true: command .*{named}.*expected a Python interpreter and a file"):
        AgentEnvironment(command=command, data={"rows": [{"prompt": "x"}]}, warm=True)


def environment_of(directory: Path, code: str, **arguments: Any) -> AgentEnvironment:
    file = directory / "plays.py"
    file.write_text("import json, os, sys, urllib.request\n" + PREAMBLE + code)
    data = {"rows": [{"prompt": "one and one?", "answer": "two"}]}
    return AgentEnvironment(command=[sys.executable, str(file)], data=data, warm=True, **arguments)


def context(directory: Path) -> EnvironmentContext:
    return EnvironmentContext("agents", directory, directory, 0)


async def test_rollouts_of_an_environment_have_keys_of_their_own(chat: Chat, tmp_path: Path) -> None:
    code = ONE_CALL + f"print({NAMES[:5]!r}, [os.environ[name] for name in {NAMES[:5]!r}], file=sys.stderr)\nprint(1)"
    environment = environment_of(tmp_path, code, reward_file=True, variables={"OPENAI_API_KEY": "nobody's"})
    async with environment_started(environment, context(tmp_path)):
        states: list[dict[str, Any]] = [{}, {}]
        example = environment.example(0)
        await asyncio.gather(*(environment.rollout(example, ScriptedModel(chat, ["x"]), state) for state in states))
    assert [state["reward"] for state in states] == [1.0, 1.0]
    assert states[0]["errors"] != states[1]["errors"]


async def test_an_environment_whose_program_cannot_be_kept_warm_does_not_start(tmp_path: Path) -> None:
    environment = environment_of(tmp_path, "")
    (tmp_path / "plays.py").write_text("import no_such_module_here")
    with pytest.raises(ValueError, match=r"environment 'agents': its start failed: .*no_such_module_here"):
        async with environment_started(environment, context(tmp_path)):
            pass


@pytest.mark.parametrize("ends", ["by itself", "cancelled", "flooded"])
async def test_a_rollout_leaves_no_process(chat: Chat, tmp_path: Path, ends: str) -> None:
    file, reward = tmp_path / "pids", tmp_path / "reward"
    then = {"by itself": "print('0.0')", "cancelled": "time.sleep(1000)", "flooded": "while True: print('x' * 65536)"}[
        ends
    ]
    environment = environment_of(tmp_path, ONE_CALL + LEAVES.format(file=str(file), reward=str(reward)) + then)
    async with environment_started(environment, context(tmp_path)):
        rollout = asyncio.create_task(environment.rollout(environment.example(0), ScriptedModel(chat, ["x"]), {}))
        await until(file.exists, "the agent's children")
        if ends == "cancelled":
            rollout.cancel()
        with suppress(asyncio.CancelledError, RuntimeError):
            await rollout
        assert not any(map(_runs, map(int, file.read_text().split())))


ORCHESTRATOR = """
import asyncio, sys
from pathlib import Path
from counterpoint.environments.gateway.warm import WarmProgram
async def main():
    program = WarmProgram(sys.argv[1:4], {"PATH": "/usr/bin:/bin"}, None)
    await program.run({"PATH": "/usr/bin:/bin", "TMPDIR": "/tmp"}, Path("."), Path("/dev/null"))
asyncio.run(main())
"""


async def test_nothing_outlives_the_orchestrator(tmp_path: Path) -> None:
    program = Bench(tmp_path, WAITS, str(tmp_path))
    orchestrator = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ORCHESTRATOR, *program.command, cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    await until((tmp_path / "begun").exists, "the program")
    pids = [*map(int, (tmp_path / "begun").read_text().split())]
    assert all(map(_runs, pids))
    orchestrator.kill()
    await orchestrator.wait()
    await until(lambda: not any(map(_runs, pids)), "the end of template and guard")
