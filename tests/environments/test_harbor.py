"""Harbor's directories: played with a shell in a box, scored by tests that the policy cannot reach, or refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.base import EnvironmentContext
from counterpoint.environments.chat import Chat
from counterpoint.environments.sandbox.box import Box, BoxLost
from counterpoint.environments.sandbox.python_sandbox import SandboxUnavailable
from counterpoint.environments.scripted import ScriptedModel, play
from counterpoint.environments.tasks.harbor import Harbor
from counterpoint.environments.tools.hermes import write_hermes
from counterpoint.transport.records import Rollout

NO_NETWORK = '[environment]\nnetwork_mode = "no-network"\nstorage_mb = 64\n'
DOCKERFILE = "FROM python:3-slim\nWORKDIR /app\nENV GREETING=hello\nCOPY data/ ./data/\n"
TEST = """#!/bin/bash
if [ "$(cat <(cat /app/answer.txt 2>/dev/null))" = 42 ]; then echo 1 > /logs/verifier/reward.txt
else echo 0 > /logs/verifier/reward.txt; fi
"""


@pytest.fixture
async def boxes() -> None:
    """Skips where the machine confines no box."""
    try:
        async with Box(1, 256) as box:
            await box.begin()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def task(root: Path, name: str = "one", test: str = TEST, toml: str = NO_NETWORK, dockerfile: str = DOCKERFILE) -> Path:
    directory = root / name
    for place in ("environment/data", "tests"):
        (directory / place).mkdir(parents=True)
    (directory / "task.toml").write_text(toml)
    (directory / "instruction.md").write_text("<!-- a canary of this set -->\n\nWrite 42 to answer.txt.\n")
    (directory / "environment/Dockerfile").write_text(dockerfile)
    (directory / "environment/data/number.txt").write_text("42\n")
    (directory / "tests/test.sh").write_text(test)
    return directory


def bash(command: str) -> str:
    return write_hermes("bash", {"command": command})


def told(chat: Chat, rollout: Rollout) -> str:
    """The conversation as text."""
    *_, last = rollout.turns
    (text,) = chat.transcribe([[*last.prompt_ids.tolist(), *last.completion_ids.tolist()]])
    return text


@pytest.mark.slow
@pytest.mark.usefixtures("boxes")
async def test_a_task_is_played_and_its_tests_decide(tmp_path: Path, chat: Chat) -> None:
    task(tmp_path)
    environment = Harbor(str(tmp_path))
    assert environment.example(0).prompt == "Write 42 to answer.txt."
    commands = [
        "pwd; ls /tests | wc -l; echo $GREETING",
        "cp data/number.txt answer.txt; python3 -c 'import ssl; print(7)'",
    ]
    rollout = await play(environment, 0, chat, *map(bash, commands), "Done.")
    assert rollout.reward == 1.0
    assert "/app\n0\nhello" in told(chat, rollout)
    assert "<tool_response>7\n" in told(chat, rollout)
    assert rollout.metrics["tools/bash/calls"] == 2.0
    assert (await play(environment, 0, chat, "I will not.")).reward == 0.0


@pytest.mark.slow
@pytest.mark.usefixtures("boxes")
async def test_what_a_command_leaves_is_there_for_the_next_and_what_fails_is_told(tmp_path: Path, chat: Chat) -> None:
    task(tmp_path)
    serve = "mkdir -p /out; echo 42 > /out/index.html; (cd /out; python3 -m http.server 8000 >/dev/null 2>&1 &)"
    ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8000/').read().decode())"
    fetch = f'for _ in $(seq 300); do python3 -c "{ask}" > answer.txt 2>/dev/null && break; sleep 0.1; done'
    commands = [serve, fetch, "false"]
    rollout = await play(Harbor(str(tmp_path)), 0, chat, *map(bash, commands), "Done.")
    assert rollout.reward == 1.0
    assert "[exit code 1]" in told(chat, rollout)
    late = await play(
        Harbor(str(tmp_path), call_seconds=5.0), 0, chat, bash("echo 42 > answer.txt; sleep 100"), "Done."
    )
    assert late.reward == 1.0
    assert late.metrics["tools/bash/errors"] == 1.0


@pytest.mark.slow
@pytest.mark.usefixtures("boxes")
async def test_at_the_agents_deadline_what_it_did_is_scored(tmp_path: Path, chat: Chat) -> None:
    task(tmp_path, toml=f"{NO_NETWORK}[agent]\ntimeout_sec = 8.0\n")
    rollout = await play(Harbor(str(tmp_path)), 0, chat, bash("echo 42 > answer.txt; sleep 1000"), "never")
    assert (rollout.reward, rollout.metrics["timed_out"]) == (1.0, 1.0)


HOSTILE = {
    "writes the reward": "mkdir -p /logs/verifier; echo 1 | tee /logs/verifier/reward.txt /logs/reward.txt /reward.txt",
    "writes it as JSON": "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "writes after its end": "(setsid bash -c 'while true; do echo 1 > /logs/verifier/reward.json; done' >/dev/null 2>&1 &)",
    "waits for the tests": "nohup setsid bash -c 'while true; do echo \"echo 1 > /logs/verifier/reward.txt; exit\" > "
    "/tests/test.sh; done' >/dev/null 2>&1 & true",
    "replaces the tests": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod -w /tests",
    "moves the tests": "rmdir /tests; mkdir /app/t; ln -s /app/t /tests; "
    "echo 'echo 1 > /logs/verifier/reward.txt' > /app/t/test.sh",
    "links the logs": "rm -rf /logs; mkdir -p /app/l/verifier; ln -s /app/l /logs; echo 1 > /app/l/verifier/reward.txt",
    "links the verifier's": "rm -rf /logs/*; ln -s /app /logs/verifier; echo '{\"reward\": 1}' > /app/reward.json",
    "links its logs to the tests": "rm -rf /logs/agent; ln -s /tests /logs/agent",
    "replaces programs": "for p in cat bash sh echo; do for d in /usr/local/bin /usr/bin /bin /python/bin /app; do "
    "printf '#!/usr/bin/python3\\nprint(42)' > $d/$p; chmod +x $d/$p; done; done; mv /bin /b; mv /python /p; mv /usr /u",
    "changes the environment": "export PATH=/app BASH_ENV=/app/e; echo 'echo 1 > /logs/verifier/reward.txt; exit' | tee "
    "/app/e ~/.bashrc ~/.profile ~/.bash_profile /etc/profile /etc/ld.so.preload /etc/bash.bashrc",
    "preloads Python": "mkdir -p ~/.local/lib/python3.11/site-packages; echo 'open(\"/logs/verifier/reward.txt\",\"w\")"
    ".write(\"1\")' > ~/.local/lib/python3.11/site-packages/usercustomize.py",
    "mounts": "unshare -rm bash -c 'mount -t tmpfs x /tests'; umount /usr /etc /proc; mount --bind /app /logs",
    "stops the first process": "kill -9 1; kill -STOP 1; gdb -p 1; cat /proc/1/environ; ls /proc/1/fd",
    "replaces descriptors": "mkdir /app/fd; for n in $(seq 0 99); do echo 42 > /app/fd/$n; done; rm /dev/fd; mv /app/fd /dev/fd; "
    "ln -sf /app/fd/0 /dev/stdin",
    "fills its files": "head -c 2G /dev/zero > /app/zero; rm /app/zero; mkfifo /logs/verifier; exec 9<>/logs/verifier",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("users")
@pytest.mark.parametrize("attempt", HOSTILE.values(), ids=HOSTILE.keys())
async def test_the_reward_is_not_the_policys_to_write(everyones: Path, chat: Chat, attempt: str) -> None:
    task(everyones)
    rollout = await play(Harbor(str(everyones), call_seconds=20.0), 0, chat, bash(attempt), bash(attempt), "Done.")
    assert rollout.reward == 0.0, told(chat, rollout)


@pytest.mark.slow
@pytest.mark.usefixtures("boxes")
async def test_no_process_of_the_policys_meets_the_tests(tmp_path: Path, chat: Chat) -> None:
    seen = """#!/bin/bash
n=$(cat /proc/[0-9]*/comm | grep -c sleep); echo "{\\"reward\\": 0, \\"left\\": $n}" > /logs/verifier/reward.json
"""
    task(tmp_path, test=seen)
    leave = "for _ in 1 2 3; do (setsid nohup sleep 1000 >/dev/null 2>&1 &); done; "
    leave += "until [ $(cat /proc/[0-9]*/comm | grep -c sleep) = 3 ]; do :; done; echo three"
    rollout = await play(Harbor(str(tmp_path)), 0, chat, bash(leave), "Done.")
    assert "<tool_response>three" in told(chat, rollout)
    assert rollout.metrics["reward/left"] == 0.0


@pytest.mark.slow
@pytest.mark.usefixtures("boxes")
@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("true", "neither reward.json nor reward.txt"),
        ("echo nan > /logs/verifier/reward.txt", "reward.txt is 'nan"),
        ("echo '{\"score\": 1}' > /logs/verifier/reward.json", "reward.json"),
        ("echo '{\"reward\": true}' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "reward.json"),
        ("echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo 0 > /logs/verifier/reward.txt", "says 1 and .* 0"),
        (
            "echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo no > /logs/verifier/reward.txt",
            "reward.txt is 'no",
        ),
        ('echo \'{"reward": 0, "reward": 1}\' > /logs/verifier/reward.json', "reward.json is"),
        ("printf '1%.0s' {1..400} > /logs/verifier/reward.json", "reward.json is"),
        ("printf '1%.0s' {1..400} > /logs/verifier/reward.txt", "reward.txt is"),
        ("printf '[%.0s' {1..100000} > /logs/verifier/reward.json", "reward.json is"),
        ("mkdir /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt", "reward.json is no regular file"),
        ("mkdir /logs/verifier/reward.txt", "reward.txt is no regular file"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "reward.txt"),
        ("mkfifo /logs/verifier/reward.json", "no regular file"),
        ("head -c 2M /dev/zero > /logs/verifier/reward.txt", "more than"),
        ("rm -r /logs/verifier; ln -s / /logs/verifier", "reward.json"),
        ("sleep 100", "deadline"),
    ],
)
async def test_tests_that_say_no_reward_fail_the_rollout(tmp_path: Path, chat: Chat, test: str, why: str) -> None:
    task(tmp_path, test=test, toml=f"{NO_NETWORK}[verifier]\ntimeout_sec = {2 if test == 'sleep 100' else 60}\n")
    state: dict[str, Any] = {}
    environment = Harbor(str(tmp_path))
    with pytest.raises((ValueError, RuntimeError), match=why):
        await environment.rollout(environment.example(0), ScriptedModel(chat, ["Done."]), state)


OF_ITS_OWN = {
    "moves the directory away": "cd /; mv /app /elsewhere; rm -rf /tmp /var /root",
    "closes the directory": "chmod 0 /app /tmp /",
    "puts files in places of directories": "cd /; rm -rf /app /tmp; touch /app /tmp",
    "uses up the files": "python3 -c 'n = 0\nwhile True: open(str(n), \"w\"); n += 1'; rmdir /tests /logs",
    "uses up the room": "head -c 1G /dev/zero > /app/zero; rmdir /tests /logs",
    "limits the first process": "prlimit --pid 1 --nofile=1:1 --fsize=0:0 --as=1:1; kill -INT 1",
    "takes all processes": "for i in $(seq 2000); do sleep 1000 & done",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("users")
@pytest.mark.parametrize("attempt", OF_ITS_OWN.values(), ids=OF_ITS_OWN.keys())
async def test_what_a_policy_breaks_is_its_own(everyones: Path, chat: Chat, attempt: str) -> None:
    task(everyones)
    failed = ""
    reward: float | None = 0.0
    try:
        reward = (
            await play(Harbor(str(everyones), call_seconds=20.0), 0, chat, bash(attempt), bash("true"), "Done.")
        ).reward
    except ValueError as error:
        failed = str(error)
    assert reward == 0.0
    assert not failed or "neither reward.json nor reward.txt" in failed


STARTS = "echo 1 > /logs/verifier/reward.txt"
"""What a file with which a program starts would do, if the tests read it."""


@pytest.mark.slow
@pytest.mark.usefixtures("boxes")
@pytest.mark.parametrize(
    ("instruction", "reward"), [("Write 42 to answer.txt.", 0.0), ("Put a line into ~/.profile.", 1.0)]
)
async def test_a_new_home_keeps_start_files_from_the_tests(
    tmp_path: Path, chat: Chat, instruction: str, reward: float
) -> None:
    directory = task(tmp_path, test="#!/bin/bash\necho 0 > /logs/verifier/reward.txt; bash -lc true; bash -ic true\n")
    (directory / "instruction.md").write_text(instruction)
    attempt = f"for f in .bashrc .profile .bash_profile; do echo '{STARTS}' | tee ~/$f > /$f; done"
    assert (await play(Harbor(str(tmp_path)), 0, chat, bash(attempt), "Done.")).reward == reward


@pytest.mark.slow
@pytest.mark.usefixtures("boxes")
async def test_the_tests_meet_no_project_of_the_policys_above_them(tmp_path: Path, chat: Chat) -> None:
    test = (
        "#!/bin/bash\nls -d /conftest.py /pytest.ini /setup.py /own/conftest.py; echo 0 > /logs/verifier/reward.txt\n"
    )
    environment = "FROM debian\nWORKDIR /own\nCOPY data/number.txt /setup.py\n"
    task(tmp_path, test=test, dockerfile=environment)
    rollout = await play(Harbor(str(tmp_path)), 0, chat, bash("touch conftest.py /conftest.py /pytest.ini"), "Done.")
    found = [line for line in rollout.state["verifier_output"].splitlines() if "No such file" not in line]
    assert found == ["/own/conftest.py", "/setup.py"]


@pytest.mark.slow
@pytest.mark.usefixtures("boxes")
async def test_modes_of_copies_are_those_of_the_box(tmp_path: Path, chat: Chat) -> None:
    dockerfile = "FROM debian AS base\nWORKDIR '/my app'\nCOPY --chmod=0400 data/number.txt /x\nCOPY --link --chmod=750 data /y\n"
    task(tmp_path, dockerfile=dockerfile)
    rollout = await play(Harbor(str(tmp_path)), 0, chat, bash("pwd; stat -c %a /x /y /y/number.txt"), "Done.")
    assert "<tool_response>/my app\n400\n750\n750\n" in told(chat, rollout)


@pytest.mark.slow
@pytest.mark.usefixtures("boxes")
async def test_the_check_at_the_start_plays_all_of_a_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task(tmp_path)
    environment = Harbor(str(tmp_path))
    context = EnvironmentContext("harbor", tmp_path, tmp_path, 0)
    await environment.start(context)
    monkeypatch.setattr("counterpoint.environments.tasks.harbor._archive", lambda *_: b"no archive")
    with pytest.raises(BoxLost):
        await environment.start(context)


@pytest.mark.parametrize(
    ("toml", "dockerfile", "needs"),
    [
        ("", DOCKERFILE, "network_mode"),
        ('[environment]\nnetwork_mode = "public"', DOCKERFILE, "network_mode"),
        ("[environment]\nallow_internet = true", DOCKERFILE, "network_mode"),
        (f'{NO_NETWORK}[verifier]\nnetwork_mode = "public"', DOCKERFILE, r"\[verifier\] network_mode"),
        (f'{NO_NETWORK}[verifier]\nenvironment_mode = "separate"', DOCKERFILE, "environment of their own"),
        (f"{NO_NETWORK}gpus = 1", DOCKERFILE, "gpus"),
        (f'{NO_NETWORK}os = "windows"', DOCKERFILE, "os is windows"),
        (f'{NO_NETWORK}mcp_servers = [{{name = "a", url = "http://a"}}]', DOCKERFILE, "mcp_servers"),
        (f'{NO_NETWORK}env = {{ KEY = "${{KEY}}" }}', DOCKERFILE, "KEY"),
        (f'{NO_NETWORK}[[steps]]\nname = "a"', DOCKERFILE, "steps"),
        (f'{NO_NETWORK}[agent]\nuser = "nobody"', DOCKERFILE, "user is nobody"),
        (f"{NO_NETWORK}[agent]\ntimeout_sec = 0", DOCKERFILE, "timeout_sec"),
        (f"{NO_NETWORK}[agent]\ntimeout_sec = {'9' * 400}", DOCKERFILE, "timeout_sec"),
        (f"{NO_NETWORK}[verifier]\ntimeout_sec = inf", DOCKERFILE, "timeout_sec"),
        (f"{NO_NETWORK}memory_mb = {'9' * 400}", DOCKERFILE, "memory is"),
        (f"{NO_NETWORK}memory = '{'9' * 400}G'", DOCKERFILE, "memory is"),
        (f"{NO_NETWORK}workdir = '/usr/src'", DOCKERFILE, "workdir: /usr/src"),
        (f"{NO_NETWORK}docker_image = 'debian@sha256:12'", DOCKERFILE, "docker_image: .*digest"),
        (NO_NETWORK, "FROM ubuntu:24.04\nRUN apt-get install -y tmux", "RUN apt-get"),
        (NO_NETWORK, "FROM ghcr.io/somebody/image:1", "ghcr.io/somebody/image:1"),
        (NO_NETWORK, "FROM python:2.7", "python:2.7"),
        (NO_NETWORK, "FROM debian AS a\nFROM debian", "several stages"),
        (NO_NETWORK, "FROM debian\nFROM debian", "several stages"),
        (NO_NETWORK, "FROM debian\nCOPY --from=x /a /b", "COPY"),
        (NO_NETWORK, "FROM debian\nCOPY missing /app/", "missing"),
        (NO_NETWORK, "FROM debian\nCOPY ../tests /app/", "tests"),
        (NO_NETWORK, "FROM debian\nCOPY data /tests", "/tests"),
        (NO_NETWORK, "FROM debian\nCOPY data /usr/local/bin", "/usr/local/bin"),
        (NO_NETWORK, "FROM debian\nADD data /app", "ADD"),
        (NO_NETWORK, "WORKDIR /app", "no FROM"),
    ],
)  # fmt: skip
def test_what_needs_more_than_a_box_is_refused_by_name(tmp_path: Path, toml: str, dockerfile: str, needs: str) -> None:
    task(tmp_path, "fine")
    task(tmp_path, "more", toml=toml, dockerfile=dockerfile)
    with pytest.raises(ValueError, match=rf"(?s)1 of 2 tasks.*more: .*{needs}") as refused:
        Harbor(str(tmp_path))
    assert "fine:" not in str(refused.value)
    assert len(Harbor(str(tmp_path), tasks=["f*"])) == 1


def test_a_compose_file_and_missing_files_are_refused(tmp_path: Path) -> None:
    directory = task(tmp_path)
    (directory / "environment/docker-compose.yaml").write_text("services: {}")
    (directory / "tests/test.sh").unlink()
    with pytest.raises(ValueError, match=r"(?s)compose.*tests/test\.sh"):
        Harbor(str(tmp_path))
    with pytest.raises(ValueError, match=r"no task\.toml"):
        Harbor(str(tmp_path / "one" / "tests"))


def test_the_fingerprint_is_that_of_the_tasks(tmp_path: Path) -> None:
    directory = task(tmp_path)
    before = Harbor(str(tmp_path)).fingerprint
    assert Harbor(str(tmp_path)).fingerprint == before
    test, link = directory / "tests/test.sh", directory / "tests/link"
    test.write_text("true")
    seen = {before, Harbor(str(tmp_path)).fingerprint}
    test.chmod(test.stat().st_mode ^ 0o100)
    seen.add(Harbor(str(tmp_path)).fingerprint)
    for target in ("test.sh", "other.sh"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        seen.add(Harbor(str(tmp_path)).fingerprint)
    assert len(seen) == 5
    os.close(os.open(os.fsencode(directory) + b"/tests/\xff", os.O_CREAT))
    seen.add(Harbor(str(tmp_path)).fingerprint)
    assert len(seen) == 6
    test.chmod(test.stat().st_mode ^ 0o022)
    assert Harbor(str(tmp_path)).fingerprint in seen, "whoever checks it out may write it, or not"


@pytest.mark.parametrize(
    "more", ["[verifier.env]\nEXPECTED = '43'\n", "[verifier]\ntimeout_sec = 5.0\n", "[agent]\ntimeout_sec = 5.0\n"]
)
def test_the_fingerprint_is_that_of_a_tasks_settings_too(tmp_path: Path, more: str) -> None:
    settings = [NO_NETWORK, NO_NETWORK + more, f"{NO_NETWORK}memory_mb = 300\n{more}"]
    for number, toml in enumerate(settings):
        task(tmp_path / str(number), toml=toml)
    assert len({Harbor(str(tmp_path / str(number))).fingerprint for number in range(3)}) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("boxes")
async def test_an_environments_files_are_where_its_dockerfile_puts_them(tmp_path: Path, chat: Chat) -> None:
    dockerfile = (
        "# syntax=docker/dockerfile:1\nFROM debian:12\nWORKDIR /srv\nCOPY . all\nCOPY data/*.txt /one/\n"
        'COPY ["data/number.txt", "renamed.txt"]\nWORKDIR in\nCOPY \\\n  data/number.txt .\nENV A=1 B="x y"\nCMD ["sh"]\n'
    )
    task(tmp_path, dockerfile=dockerfile)
    rollout = await play(
        Harbor(str(tmp_path)), 0, chat, bash("pwd; find /srv /one -type f | sort; echo $A-$B"), "Done."
    )
    found = told(chat, rollout).partition("<tool_response>")[2].split()
    files = [
        "/one/number.txt",
        "/srv/all/Dockerfile",
        "/srv/all/data/number.txt",
        "/srv/in/number.txt",
        "/srv/renamed.txt",
    ]
    assert found[:8] == ["/srv/in", *files, "1-x", "y"]


@pytest.mark.slow
@pytest.mark.usefixtures("boxes")
async def test_an_archive_leads_nowhere_outside(tmp_path: Path, chat: Chat) -> None:
    directory = task(tmp_path, dockerfile="FROM debian\nCOPY out /app/out\nCOPY data/number.txt /app/out/number.txt\n")
    target = tmp_path / "outside"
    target.mkdir()
    (directory / "environment/out").symlink_to(target)
    with pytest.raises(ValueError, match="out"):
        Harbor(str(tmp_path))
    (directory / "environment/out").unlink()
    (directory / "environment/out").mkdir()
    (directory / "environment/out/link").symlink_to(target)
    rollout = await play(Harbor(str(tmp_path)), 0, chat, bash(f"echo 1 > /app/out/link/x; ls {target}"), "Done.")
    assert [*target.iterdir()] == []
    assert "No such file" in told(chat, rollout)
    assert json.dumps(rollout.state)
