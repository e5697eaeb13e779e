"""Agents as processes: what they get, how they end, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway.agent import AgentEnvironment, AgentRefused
from counterpoint.environments.reward import as_rewards
from counterpoint.environments.scripted import ScriptedModel
from counterpoint.orchestrator.step.step_metrics import environment_metrics
from counterpoint.transport.records import Rollout
from counterpoint.transport.telemetry.agent_time import OWN, SECONDS, START, agent_times
from tests.support.polling import until

pytestmark = pytest.mark.slow

PREAMBLE = """
import json, os, sys, urllib.request
example = json.load(sys.stdin)
def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = [{"role": "user", "content": example["prompt"]}]
"""
ONE_CALL = "messages.append(ask(messages))\n"


def agent(code: str, **arguments: Any) -> AgentEnvironment:
    data = {"rows": [{"prompt": "one and one?", "answer": "two"}]}
    return AgentEnvironment(command=[sys.executable, "-IS", "-c", PREAMBLE + code], data=data, **arguments)


async def played(environment: AgentEnvironment, chat: Chat, *answers: str) -> tuple[Rollout, ScriptedModel]:
    model, state = ScriptedModel(chat, answers), dict[str, Any]()
    try:
        example = environment.example(0)
        await environment.rollout(example, model, state)
        rollout = Rollout("0-0", 0, "agent", 0, model.turns, state=state, turn_rewards=model.turn_rewards.array())
        score = await environment.score(example, rollout)
        rollout.reward, _, rollout.turn_rewards = as_rewards(score, environment.score, rollout)
    finally:
        await environment.close()
    return rollout, model


async def test_a_program_plays_a_rollout_and_says_its_reward(chat: Chat) -> None:
    code = ONE_CALL + (
        "messages.append({'role': 'user', 'content': 'sure?'})\n"
        "print('noise'); print(float(ask(messages)['content'] == example['answer']))\n"
    )
    rollout, model = await played(agent(code), chat, "three", "two")
    assert rollout.reward == 1.0
    first, second = model.turns
    assert second.prompt_ids.tolist()[: len(first.prompt_ids) + len(first.completion_ids)] == [
        *first.prompt_ids,
        *first.completion_ids,
    ]
    assert rollout.state["exit_code"] == 0


async def test_the_programs_own_time_is_told_apart_from_calls_of_the_model(chat: Chat) -> None:
    code = "import time\ntime.sleep(0.3)\n" + ONE_CALL + "time.sleep(0.2)\nprint(1)"
    rollout, _ = await played(agent(code), chat, "x")
    times = {name: rollout.metrics[name] for name in (START, OWN, SECONDS)}
    assert 0.3 <= times[START] <= times[OWN] - 0.2
    assert times[OWN] < times[SECONDS]
    assert agent_times([environment_metrics([rollout])]) == {"agent": pytest.approx(times)}


GIVE = """
def give(turn, reward):
    body = json.dumps({"turn": turn, "reward": reward}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/reward", body, headers))
"""


@pytest.mark.parametrize(("last", "reward"), [("print('done')", 0.75), ("print(0.75)", 0.75), ("", 0.75)])
async def test_a_program_gives_its_turns_rewards(chat: Chat, last: str, reward: float) -> None:
    code = GIVE + ONE_CALL + ONE_CALL + "give(1, 0.5); give(0, 0.25)\n" + last
    rollout, _ = await played(agent(code, turn_rewards=True), chat, "x", "y")
    assert rollout.turn_rewards is not None
    assert (rollout.turn_rewards.tolist(), rollout.reward) == ([0.25, 0.5], reward)


@pytest.mark.parametrize(
    ("code", "arguments", "error"),
    [
        ("give(0, 0.5); print(1.0)", {}, r"score returned 1\.0, and the rewards of the turns add up to 0\.5"),
        ("give(0, 0.5); print('nan')", {}, "the last line"),
        ("give(0, 1.0); give(0, 1.0)", {}, "Its newest refused request: 400: turn 0 has the reward"),
        ("try: give(7, 1.0)\nexcept Exception: print(1.0)", {}, "a reward that cannot be taken: turn is 7"),
        ("give(0, 0.5)", {"turn_rewards": False}, "403: .*args.turn_rewards"),
        ("give(0, 0.5); print('done')", {"score": f"{__name__}:half"}, r"score returned 0\.25, and the rewards"),
    ],
)
async def test_rewards_that_do_not_fit_fail_the_rollout(
    chat: Chat, code: str, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises((ValueError, RuntimeError, TypeError), match=error):
        await played(agent(GIVE + ONE_CALL + code, **({"turn_rewards": True} | arguments)), chat, "x")


def half(example: object, rollout: Rollout) -> float:
    return 0.25


FILE = "open(os.environ['AGENT_REWARD_FILE'], 'w').write({!r})\n"
SHELL = "import subprocess\nsubprocess.run(['sh', '-c', {!r}], capture_output=True)\n"
"""As a harness runs a command that the model asked for."""
SURVIVES = """
import signal
ends, holds = os.pipe()
if not os.fork():
    signal.pause()
if not os.fork():
    os.setsid()
    os.close(holds)
    os.read(ends, 1)
    os.write(1, b"1.0\\n")
    os._exit(0)
"""
"""Leaves a process that writes when the agent's group has been killed."""


@pytest.mark.parametrize(
    ("code", "asks", "reward"),
    [
        (FILE.format("0.25") + "print('done')", True, 0.25),
        (FILE.format("0.25"), True, 0.25),
        (FILE.format("+2.5e-1\n") + "print('0.25')", True, 0.25),
        (FILE.format("0.25") + "print('scored 0.25 in 3 turns')", True, 0.25),
        ("print(0.25)", True, 0.25),
        ("print('AGENT_REWARD_FILE' in os.environ); print(1)", False, 1.0),
        (SHELL.format('echo 1.0 > "${AGENT_REWARD_FILE-$TMPDIR/reward}"') + "print('0.0')", False, 0.0),
        (SHELL.format("echo 1.0; echo 1.0 >&2") + "print('0.0')", False, 0.0),
        (SURVIVES + "print('0.0')", False, 0.0),
        ("print('1.0'); print('0.0', end='')", False, 0.0),
    ],
)
async def test_a_reward_is_the_agents_own_word(chat: Chat, code: str, asks: bool, reward: float) -> None:
    environment = agent(ONE_CALL + code, **({"reward_file": True} if asks else {}))
    assert environment.reward_bounds == (0.0, 1.0)
    assert (await played(environment, chat, "x"))[0].reward == reward


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (SHELL.format('echo 1.0 > "$AGENT_REWARD_FILE"') + "print('0.0')", "two rewards"),
        (FILE.format("1.0") + "print('nan')", "the last line"),
        (FILE.format("1.0") + "print('1_0')", "the last line"),
        (FILE.format("nan") + "print('1.0')", "AGENT_REWARD_FILE is 'nan'"),
        (FILE.format("") + "print('1.0')", "AGENT_REWARD_FILE is ''"),
        (FILE.format("1.0 1.0"), "AGENT_REWARD_FILE is"),
        ("os.mkfifo(os.environ['AGENT_REWARD_FILE'])\nprint(1)", "expected a regular file"),
        ("os.mkdir(os.environ['AGENT_REWARD_FILE'])\nprint(1)", "expected a regular file"),
    ],
)
async def test_two_words_that_differ_fail_the_rollout(chat: Chat, code: str, error: str) -> None:
    with pytest.raises((ValueError, OSError), match=error):
        await played(agent(ONE_CALL + code, reward_file=True), chat, "x")


def test_rewards_of_turns_have_no_bounds_of_the_agents_reward() -> None:
    assert agent(ONE_CALL, turn_rewards=True).reward_bounds is None


async def test_what_scores_outranks_both_words(chat: Chat) -> None:
    scorer = "tests.environments.gateway.test_agent:scored"
    environment = agent(ONE_CALL + FILE.format("1.0") + "print('0.0')", score=scorer, reward_file=True)
    assert environment.reward_bounds is None
    assert (await played(environment, chat, "x"))[0].reward == 0.5


async def test_a_function_may_score_and_the_agent_has_no_answer_then(chat: Chat) -> None:
    code = ONE_CALL + "print(json.dumps(example))\n"
    environment = agent(code, score="tests.environments.gateway.test_agent:scored")
    rollout, _ = await played(environment, chat, "x")
    assert rollout.reward == 0.5
    assert "two" not in rollout.state["output"]


async def scored(example: Any, rollout: Rollout) -> float:
    return 0.5 if example.answer == "two" and rollout.turns else 0.0


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print(1)", "without a call of the model"),
        (ONE_CALL + "sys.exit('it broke')", "ended with exit code 1. Its errors: it broke"),
        (ONE_CALL + "os.kill(os.getpid(), 9)", "ended by signal 9"),
        (ONE_CALL, "the last line of the agent's output is ''; expected the reward"),
        (ONE_CALL + "print('nan')", "is 'nan'; expected the reward"),
        (ONE_CALL + "print('0.0 \\u2028 1.0')", "expected the reward"),
        (ONE_CALL + "os.environ['AGENT_REWARD_FILE']", r"args\.reward_file = true"),
        ("ask([])", "exit code 1. Its newest refused request: 400: messages is a list of 0"),
        ("try: ask([])\nexcept OSError: pass\n" + ONE_CALL + "sys.exit('its tool is down')", "400: .*its tool is down"),
        (ONE_CALL + "ask([])", "exit code 1. Its newest refused request: 400: messages is a list of 0"),
        (ONE_CALL + "while True: print('x' * 65536)", "wrote more than 16 MiB"),
    ],
)
async def test_an_agent_that_fails_costs_its_rollout(chat: Chat, code: str, error: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match=error) as caught:
        await played(agent(code), chat, "x")
    assert isinstance(caught.value, AgentRefused) == code.startswith("ask([])"), "no repetition would help"


async def test_only_named_variables_are_passed_on(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    monkeypatch.setenv("NAMED", "passed")
    code = ONE_CALL + "print(sorted(os.environ.values())); print(1)\n"
    rollout, _ = await played(agent(code, pass_on=["NAMED"], variables={"OWN": "set"}), chat, "x")
    assert "s3cret" not in rollout.state["output"]
    assert "passed" in rollout.state["output"]
    assert "set" in rollout.state["output"]


LEAVES = """
import subprocess, time
children = [subprocess.Popen(['sleep', '1000'], start_new_session=own) for own in (False, True)]
if not os.fork():
    os.setsid()
    if os.fork():
        os._exit(0)
    [os.close(each) for each in (0, 1, 2)]
    open({file!r} + '.new', 'w').write(' '.join(map(str, [os.getpid(), *(child.pid for child in children)])))
    os.rename({file!r} + '.new', {file!r})
    while True:
        open({reward!r}, 'w').write('1.0')
while not os.path.exists({file!r}):
    time.sleep(0.01)
"""
"""Leaves a child, one in a session of its own, and a daemon that goes on to write a reward."""


@pytest.mark.parametrize("ends", ["print('0.0')", "time.sleep(1000)"])
async def test_a_rollout_leaves_no_process(chat: Chat, tmp_path: Path, ends: str) -> None:
    file, reward = tmp_path / "pids", tmp_path / "reward"
    code = ONE_CALL + LEAVES.format(file=str(file), reward=str(reward)) + ends
    rollout = asyncio.create_task(played(agent(code), chat, "x"))
    await until(file.exists, "the agent's children")
    if "sleep" in ends:
        rollout.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rollout
    else:
        assert (await rollout)[0].reward == 0.0
    assert not any(map(_runs, map(int, file.read_text().split())))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"command": "python agent.py"}, "expected a list of texts"),
        ({"command": []}, "expected a list of texts"),
        ({"command": ["no-such-program-here"]}, "no program 'no-such-program-here'"),
        ({"data": {"path": "/no/such/file.jsonl"}}, "/no/such/file"),
        ({"pass_on": ["NOT_SET_ANYWHERE"]}, "NOT_SET_ANYWHERE: not set"),
        ({"score": "nothing"}, "expected an import path"),
        ({"score": "nothing.here:score"}, "importing 'nothing.here' failed"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        AgentEnvironment(**{"command": [sys.executable], "data": {"rows": [{"prompt": "x"}]}} | arguments)


def test_examples_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "examples.jsonl"
    file.write_text('{"prompt": "a", "answer": 1}\n{"prompt": "b", "level": 2}\n{"prompt": 3}\n')
    environment = AgentEnvironment(command=[sys.executable], data={"path": str(file)})
    assert [environment.example(index).prompt for index in range(2)] == ["a", "b"]
    assert environment.example(0).answer == "1"
    assert environment.example(1).info == {"level": 2}
    with pytest.raises(ValueError, match=r"examples\.jsonl:3: prompt is 3; expected text"):
        environment.example(2)


async def test_an_agent_reads_numbers_as_the_file_has_them(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "examples.jsonl"
    file.write_text(
        '{"prompt": "a", "answer": 1180591620717411303425, "limit": 2.50, "most": [18446744073709551616]}\n'
    )
    code = ONE_CALL + "print(float(open(os.environ['AGENT_EXAMPLE_FILE']).read() == messages[1]['content']))"
    environment = AgentEnvironment([sys.executable, "-IS", "-c", PREAMBLE + code], {"path": str(file)})
    example = environment.example(0)
    assert (example.answer, example.info) == ("1180591620717411303425", {"limit": 2.5, "most": [2**64]})
    shown = '{"index":0,"prompt":"a","info":{"limit":2.50,"most":[18446744073709551616]},"answer":"1180591620717411303425"}\n'
    rollout, _ = await played(environment, chat, shown)
    assert rollout.reward == 1.0
