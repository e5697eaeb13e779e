"""Episodes of each kind, played by a scripted model: turns, masks, rewards, metrics, and failures."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.base import EnvironmentContext, Reply, ToolCall
from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.gateway.conversation import Histories
from counterpoint.environments.main_thread import NeedsMainThread
from counterpoint.environments.reward import as_rewards
from counterpoint.environments.scripted import ScriptedModel
from counterpoint.environments.verifiers_library.environment import Verifiers
from counterpoint.environments.verifiers_library.policy_client import (
    MALFORMED_CALL,
    Seat,
    _answer,
    _with_malformed_call,
)
from counterpoint.environments.workers.load import load_environment
from counterpoint.orchestrator.step.finalize import find_fault
from counterpoint.transport.records import Rollout, Turn
from tests.environments.verifiers_library.conftest import SAMPLES, CallingModel, Running

# The library is imported in three seconds.
pytestmark = pytest.mark.slow


async def played(environment: Verifiers, model: ScriptedModel, index: int = 0) -> Rollout:
    example, state = environment.example(index), dict[str, Any]()
    await environment.rollout(example, model, state)
    assert json.loads(json.dumps(state)) == state
    rollout = Rollout("0-0", 0, "library", index, model.turns, state=state)
    rollout.turn_rewards = model.turn_rewards.array()
    rewards = as_rewards(await environment.score(example, rollout), environment.score, rollout)
    rollout.reward, rollout.player_rewards, rollout.turn_rewards = rewards
    assert find_fault(rollout) is None
    return rollout


def texts(chat: Chat, turns: list[Turn]) -> list[tuple[str, ...]]:
    return [tuple(chat.transcribe([turn.prompt_ids.tolist(), turn.completion_ids.tolist()])) for turn in turns]


async def test_one_turn(chat: Chat, running: Running) -> None:
    async with running("spelling", taskset={"words": ["sun", "star"]}) as environment:
        assert len(environment) == 2
        assert environment.example(1) == environment.example(1)
        assert environment.example(1).answer == "rats"
        assert environment.fingerprint != Verifiers(id=f"{__package__}.samples.spelling").fingerprint
        rollout = await played(environment, ScriptedModel(chat, ["nuts"]), index=1)
    assert texts(chat, rollout.turns) == [("<|user|>reverse star<|end|><|assistant|>", "nuts<|end|>")]
    assert rollout.reward == 0.25
    assert rollout.metrics == {
        "turns": 1, "truncated": 0, "timed_out": 0, "reward/exact": 0, "reward/length": 1, "letters": 4,
    }  # fmt: skip


async def test_what_sets_alarms_runs_in_the_main_thread_or_not_at_all(
    chat: Chat, running: Running, tmp_path: Path
) -> None:
    """The library's own reward gives 0 for whatever is raised, so that a failure alone would go unseen."""
    with pytest.raises(NeedsMainThread, match=r"sums\.py:\d+. uses math_verify.*workers"):
        async with running("sums"):
            pass
    async with running("hidden_sums") as environment:
        with pytest.raises(NeedsMainThread, match=r"math_verify.*workers"):
            await played(environment, ScriptedModel(chat, ["42"]))
    for sample, reward in (("sums", 2.0), ("hidden_sums", 1.0)):
        environment = Verifiers(id=f"{__package__}.samples.{sample}")
        await environment.start(EnvironmentContext("library", tmp_path / sample, tmp_path, seed=0, own_process=True))
        try:
            assert (await played(environment, ScriptedModel(chat, ["42"]))).reward == reward
            assert (await played(environment, ScriptedModel(chat, ["43"]))).reward == 0
        finally:
            await environment.close()


async def test_several_turns_are_extended_token_for_token(chat: Chat, running: Running) -> None:
    async with running("guessing", select={"limit": 7}) as environment:
        assert len(environment) == 7
        rollout = await played(environment, ScriptedModel(chat, ["5", "2", "4"]), index=3)
    first, second, third = rollout.turns
    assert second.prompt_ids.tolist()[: len(first.prompt_ids) + len(first.completion_ids)] == [
        *first.prompt_ids,
        *first.completion_ids,
    ]
    prompt, said = texts(chat, [third])[0]
    assert prompt == (
        "<|user|>guess 1-7<|end|><|assistant|>5<|end|><|user|>lower<|end|><|assistant|>2<|end|><|user|>higher<|end|><|assistant|>"
    )
    assert said == "4<|end|>"
    assert rollout.reward == 1
    assert rollout.metrics["guesses"] == 2


async def test_turns_of_an_untrainable_agent_are_not_trained(chat: Chat, running: Running) -> None:
    async with running("debate") as environment:
        rollout = await played(environment, ScriptedModel(chat, ["pro", "yes", "con", "no"]))
    assert [turn.trained_tokens > 0 for turn in rollout.turns] == [True, False, True, False]
    assert [turn.player for turn in rollout.turns] == ["solver", "", "solver-2", ""]
    assert rollout.player_rewards == {"solver": 1, "solver-2": 0}
    assert rollout.metrics["solver/best"] == 0.5
    assert rollout.state["agents"] == ["solver", "judge", "solver", "judge"]


async def test_what_the_environment_rewrote_is_not_trained(chat: Chat, running: Running) -> None:
    async with running("rewriting") as environment:
        rollout = await played(environment, ScriptedModel(chat, ["secret", "please"]))
    assert [turn.trained_tokens for turn in rollout.turns] == [0, len("please") + 1]
    assert texts(chat, rollout.turns)[1][0] == (
        "<|user|>ask<|end|><|assistant|>***<|end|><|user|>again<|end|><|assistant|>"
    )
    assert rollout.reward == 1


async def test_only_the_agents_named_are_trained(chat: Chat, running: Running) -> None:
    arguments: dict[str, Any] = {"env": {"id": "user-sim", "user": {"max_turns": 3}}, "trained": ["user"]}
    async with running("spelling", **arguments) as environment:
        with pytest.raises(Exception, match="no agent that is trained"):  # its author leaves the user untrained
            await played(environment, ScriptedModel(chat, ["please", "rats", "###DONE###"]))


async def test_the_librarys_own_environments(chat: Chat, running: Running) -> None:
    async with running("spelling", env={"id": "best-of-n", "n": 2}) as environment:
        rollout = await played(environment, ScriptedModel(chat, ["rats", "x"]))
    assert rollout.player_rewards == {"agent": 1, "agent-2": 0}
    assert (rollout.metrics["best"], rollout.metrics["pass_at_n"]) == (0.5, 1)
    async with running("spelling", env={"id": "user-sim"}) as environment:
        rollout = await played(environment, ScriptedModel(chat, ["please", "rats", "###DONE###"]))
    assert [turn.trained_tokens > 0 for turn in rollout.turns] == [False, True, False]
    assert rollout.reward == 1


@pytest.mark.filterwarnings(
    "ignore:The 'initial' parameter is deprecated:DeprecationWarning"
)  # of tenacity, by the library
async def test_tools_with_state(
    tools_chat: Chat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, running: Running
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    amounts = ["2", str(2**70), str(-(2**70)), '"\\ud800"', "3"]
    calls = [f'call add {{"amount": {amount}}}' for amount in amounts]
    answers = [*calls[:1], "call ? {", *calls[1:], 'call multiply {"by": 2}', "done"]
    async with running("", id=str(SAMPLES / "counting_tools.py")) as environment:
        rollout = await played(environment, CallingModel(tools_chat, answers))
    prompt = texts(tools_chat, rollout.turns)[-1][0]
    assert prompt.startswith("<|system|>add <|end|><|user|>count to 5<|end|><|assistant|>")
    results = prompt.split("<|user|>")[2:]
    assert [result.split("<|end|>")[0] for result in results] == [
        "2",
        "error: cannot read {",
        str(2**70 + 2),
        "2",
        "error: add: its arguments hold half a character",
        "5",
        "error: unknown tool 'multiply'",
    ]
    assert rollout.reward == 1
    assert rollout.metrics["turns"] == 8


def test_a_turn_that_was_cut_has_its_complete_calls_and_one_that_says_so() -> None:
    cut = Reply("", calls=(ToolCall("1", "add", {"amount": 1}),), malformed="it was cut")
    made = _with_malformed_call(cut).calls
    assert [(call.name, call.arguments) for call in made] == [
        ("add", {"amount": 1}),
        (MALFORMED_CALL, {"error": "it was cut"}),
    ]
    unsendable = Reply("", calls=(ToolCall("1", "add", {"amount": "\ud800"}),), malformed="it was cut")
    assert [call.name for call in _with_malformed_call(unsendable).calls] == [MALFORMED_CALL]


async def test_a_demanded_call_is_one_and_not_trained(tools_chat: Chat) -> None:
    calls = [{"name": "add", "parameters": {"amount": 1}}]
    model = CallingModel(tools_chat, [json.dumps(calls)])
    seat = Seat(model, asyncio.get_running_loop(), Histories(tools_chat))
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    demand = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    turn, answer = await _answer(seat, {"messages": [{"role": "user", "content": "count"}], **demand})
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"amount":1}'}
    assert turn.trained_tokens == 0


async def test_episodes_at_once_do_not_mix(chat: Chat, running: Running) -> None:
    async with running("spelling") as environment:
        models = [ScriptedModel(chat, [word]) for word in ("rats", "noom", "nus")]
        rollouts = await asyncio.gather(*(played(environment, model, index) for index, model in enumerate(models)))
    assert [rollout.reward for rollout in rollouts] == [1, 1, 1]
    assert all(len(model.turns) == 1 for model in models)


async def test_a_failed_call_fails_the_rollout_with_its_reason(chat: Chat, running: Running) -> None:
    class Broken(ScriptedModel):
        async def generate(self, prompt_ids: Any, sampling: Any = None) -> Turn:
            raise OSError("the server is gone")

    async with running("spelling") as environment:
        with pytest.raises(Exception, match="agent 'agent': ProviderError: OSError: the server is gone"):
            await played(environment, Broken(chat, []))


async def test_failures_of_an_author_cost_one_rollout_each(chat: Chat, running: Running) -> None:
    complaints = {0: "setup.*no disk", 1: "KeyError: 'answer'", 2: "3", 3: "could not convert string to float: 'good'"}
    async with running("failing") as environment:
        for index, complaint in complaints.items():
            with pytest.raises(BaseException, match=complaint) as failure:
                await played(environment, ScriptedModel(chat, ["a"]), index)
            assert not isinstance(failure.value, asyncio.CancelledError)
        rollout = await played(environment, ScriptedModel(chat, ["a"]), index=4)
    assert rollout.reward == 1


async def test_a_cancelled_rollout_ends_its_episode(chat: Chat, running: Running) -> None:
    called = asyncio.Event()

    class Stuck(ScriptedModel):
        async def generate(self, prompt_ids: Any, sampling: Any = None) -> Turn:
            called.set()
            await asyncio.Event().wait()
            raise AssertionError

    async with running("spelling") as environment:
        task = asyncio.create_task(played(environment, Stuck(chat, [])))
        async with asyncio.timeout(60):
            await called.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        rollout = await played(environment, ScriptedModel(chat, ["rats"]))
    assert rollout.reward == 1


async def test_a_missed_deadline_of_the_library_fails_the_rollout(chat: Chat, running: Running) -> None:
    class Stuck(ScriptedModel):
        async def generate(self, prompt_ids: Any, sampling: Any = None) -> Turn:
            await asyncio.Event().wait()
            raise AssertionError

    async with running("spelling", env={"timeout": {"episode": 0.1}}) as environment:
        with pytest.raises(Exception, match=r"exceeded its 0.1s deadline"):
            await played(environment, Stuck(chat, []))


async def test_closing_ends_what_still_plays(chat: Chat, running: Running) -> None:
    called, cancelled = asyncio.Event(), asyncio.Event()

    class Stuck(ScriptedModel):
        async def generate(self, prompt_ids: Any, sampling: Any = None) -> Turn:
            called.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            raise AssertionError

    async with running("spelling") as environment:
        task = asyncio.create_task(played(environment, Stuck(chat, [])))
        async with asyncio.timeout(60):
            await called.wait()
    async with asyncio.timeout(60):
        await asyncio.wait([task])
        await cancelled.wait()
    assert task.cancelled() or task.exception() is not None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("verifiers")]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"id": "no-such-environment"}, "taskset 'no-such-environment' not found"),
        ({"id": "tests.no_such.module"}, "id = 'tests.no_such.module': importing"),
        ({"id": "./no_such_directory"}, "expected one of"),
        ({"taskset": {"wrods": []}}, "taskset.wrods"),
        ({"taskset": {"words": 3}}, "taskset.words = '3'"),
        ({"env": {"agent": {"max_turns": "many"}}}, "env.agent.max_turns = 'many'"),
        ({"env": {"id": "no-such-env"}}, "environment 'no-such-env' not found"),
        ({"env": {"taskset": {}}}, "env.taskset"),
        ({"select": {"limit": 0}}, "select.limit = '0'"),
        ({"select": {"include": {"idx": "7:"}}}, "has no examples"),
        ({"trained": ["solver"]}, r"\['solver'\] are no agents of this environment; it has agent"),
    ],
)
def test_a_wrong_configuration_is_told(arguments: dict[str, Any], complaint: str) -> None:
    given = {"id": f"{__package__}.samples.spelling"} | arguments
    with pytest.raises(ValueError, match=complaint):
        load_environment(EnvironmentConfig(name="library", kind="verifiers", args=given))


def test_a_file_must_not_have_the_name_of_another_module(tmp_path: Path) -> None:
    (tmp_path / "json.py").touch()
    with pytest.raises(ValueError, match="a module 'json' exists already"):
        Verifiers(id=str(tmp_path / "json.py"))


OLD_FORM = """import verifiers as vf


def load_environment(**kwargs){annotation}:
    return vf.SingleTurnEnv(rubric=vf.Rubric(funcs=[]), **kwargs)
"""


@pytest.mark.parametrize("annotation", ["", " -> vf.Environment"])
def test_an_environment_of_the_form_before_0_4_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, annotation: str
) -> None:
    """The second form fails even when it is imported, by its annotation."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"old_form_{len(annotation)}"
    (tmp_path / f"{name}.py").write_text(OLD_FORM.format(annotation=annotation))
    with pytest.raises(ValueError, match=r"load_environment.*before 0\.4"):
        Verifiers(id=str(tmp_path / f"{name}.py"))
    with pytest.raises(ValueError, match=r"load_environment.*before 0\.4"):
        Verifiers(id=name)  # as an installed package


def test_an_infinite_taskset_needs_a_bound() -> None:
    with pytest.raises(ValueError, match="the taskset is infinite"):
        Verifiers(id=f"{__package__}.samples.guessing")


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "verifiers.v1", raising=False)
    with pytest.raises(ValueError, match=r'pip install "counterpoint\[verifiers\]"'):
        Verifiers(id="anything")
