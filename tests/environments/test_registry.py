"""The registry: built-ins, import paths, the documentation's own example, and a message for each thing that can be wrong."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.registry import BUILT_IN
from counterpoint.environments.scripted import play
from counterpoint.environments.tasks.guess_number import GuessNumber
from counterpoint.environments.workers.load import load_environment

GOOD = """
class {name}:
    group_scoring = {group_scoring}
    def __len__(self): return {length}
    def example(self, index): return None
    async def rollout(self, example, model, state): pass
    {score}
"""


def load(kind: str, **args: Any) -> Any:
    return load_environment(EnvironmentConfig(name="mine", kind=kind, args=args))


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module that can be imported for the length of a test."""

    def write(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, name, raising=False)

    return write


NEEDS_ARGUMENTS = {
    "agent": "command",
    "harbor": "path",
    "single-turn": "data",
    "tools": "tools",
    "verifiers": "id",
}
"""Kinds that cannot be loaded without any, and what they ask for. Their own tests load them."""


def test_a_kind_of_earlier_versions_says_what_does_instead() -> None:
    with pytest.raises(ValueError, match=r"kind = 'seat'.*opponent"):
        load_environment(EnvironmentConfig(name="e", kind="seat", args={"host": "a/b"}))


@pytest.mark.parametrize("kind", sorted(BUILT_IN.keys() - NEEDS_ARGUMENTS.keys()))
def test_a_built_in_loads_as_it_is(kind: str) -> None:
    assert len(load(kind)) > 0


@pytest.mark.parametrize("kind", NEEDS_ARGUMENTS)
def test_a_built_in_says_what_it_needs(kind: str) -> None:
    with pytest.raises(ValueError, match=f"missing a required argument: '{NEEDS_ARGUMENTS[kind]}'"):
        load(kind)


@pytest.mark.parametrize(
    ("kind", "args", "known"),
    [
        ("reverse-text", {}, "answer"),
        ("closest-number", {}, "distance"),
        ("guess-number", {}, "guesses"),
        ("arithmetic", {}, "tools"),
        ("agent", {"command": ["true"], "data": {"rows": [{"a": 1}]}}, "exit_code"),
    ],
)
def test_a_column_that_the_state_never_has_is_refused(kind: str, args: dict[str, Any], known: str) -> None:
    config = {"name": "mine", "kind": kind, "args": args}
    load_environment(EnvironmentConfig(**config, state_columns=[known]))
    with pytest.raises(ValueError, match=rf"state_columns: .* no '{known}x'; did you mean '{known}'"):
        load_environment(EnvironmentConfig(**config, state_columns=[known, f"{known}x"]))


def test_arguments_reach_the_constructor() -> None:
    environment = load("guess-number", largest=20, guesses=5)
    assert isinstance(environment, GuessNumber)
    assert len(environment) == 20


async def test_the_documentation_s_example_works(write_module: Any, chat: Chat) -> None:
    page = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
    (source,) = re.findall(r"```python\n# my_tasks\.py\n(.*?)```", page, re.DOTALL)
    write_module("my_tasks", source)
    environment = load("my_tasks:SumWithSecondTry", largest=20)
    answer = environment.example(0).answer
    assert (await play(environment, 0, chat, answer)).reward == 1.0
    assert (await play(environment, 0, chat, "?", answer)).reward == 0.5
    missed = await play(environment, 0, chat, "?", "??")
    assert missed.reward == 0.0
    assert missed.state == {"tries": ["?", "??"]}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("revers-text", "'revers-text' is not known; did you mean 'reverse-text'? Built in are"),
        ("zzz", "Built in are agent, arithmetic, closest-number"),
        ("no_such_module_here:Task", "importing 'no_such_module_here' failed: ModuleNotFoundError"),
        (
            "counterpoint.environments.tasks.guess_number:GuesNumber",
            "no class 'GuesNumber'; did you mean 'GuessNumber'?",
        ),
        (":Task", "failed: ValueError"),
    ],
)
def test_a_kind_that_cannot_be_found(kind: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load(kind)
    assert str(caught.value).startswith("environment 'mine': kind = ")


def test_a_module_that_fails_to_import(write_module: Any) -> None:
    write_module("broken_tasks", "raise RuntimeError('no data here')")
    with pytest.raises(ValueError, match="importing 'broken_tasks' failed: RuntimeError: no data here"):
        load("broken_tasks:Task")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"largets": 9},
            "args: got an unexpected keyword argument 'largets'; did you mean 'largest'? Allowed are largest, guesses",
        ),
        ({"largest": 0}, "args = {'largest': 0}: ValueError: largest = 0"),
    ],
)
def test_arguments_that_do_not_fit(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load("guess-number", **args)


def test_arguments_that_a_class_passes_on_are_among_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match=r"Allowed are tools, .*, data, rubric, prompt") as caught:
        load("tools")
    assert "single_turn" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_scoring": "None"}, "needs an attribute group_scoring, True or False, and has None"),
        ({"score": "def score(self, example, rollout): return 0.0"}, "needs a method `async def score`"),
        ({"group_scoring": "True"}, "needs a method `async def score_group`"),
        (
            {"score": "async def scoer(self, example, rollout): return 0.0"},
            "needs a method `async def score`; did you misspell it (scoer, ",
        ),
        (
            {"score": "async def score(self, rollout): return 0.0"},
            "score(rollout) does not take what it is called with: too many positional arguments; expected score(self, example, ",
        ),
        ({"length": "0"}, "has no examples"),
        ({"length": "'x'"}, "needs a method __len__"),
        ({"length": "3\n    reward_bounds = (1, 0)"}, "Task: reward_bounds = (1, 0); expected two finite numbers"),
        ({"length": "3\n    reward_bounds = property(lambda self: 1 / 0)"}, "Task: reward_bounds: ZeroDivisionError"),
    ],
)
def test_a_class_of_another_shape(write_module: Any, change: dict[str, str], message: str) -> None:
    parts = {"name": "Task", "group_scoring": "False", "length": "3"}
    parts["score"] = "async def score(self, example, rollout): return 0.0"
    write_module("shaped_tasks", GOOD.format(**parts))
    assert len(load("shaped_tasks:Task")) == 3
    write_module("misshaped_tasks", GOOD.format(**(parts | change)))
    with pytest.raises(ValueError, match=re.escape(message)):
        load("misshaped_tasks:Task")


DECORATED = """import functools

def weighted(score):
    @functools.wraps(score)
    async def scored(self, *arguments):
        return await score(self, *arguments, 0.5)
    return scored

"""


def test_a_decorator_may_give_a_method_what_the_caller_does_not(write_module: Any) -> None:
    score = "@weighted\n    async def score(self, example, rollout, weight): return weight"
    write_module(
        "decorated_tasks", DECORATED + GOOD.format(name="Task", group_scoring="False", length="3", score=score)
    )
    assert len(load("decorated_tasks:Task")) == 3


@pytest.mark.parametrize("name", ["all", "All"])
def test_no_environment_has_the_name_of_all(name: str) -> None:
    with pytest.raises(ValueError, match="stands for all environments together"):
        EnvironmentConfig(name=name, kind="arithmetic")
    assert EnvironmentConfig(name="all-sums", kind="arithmetic").name == "all-sums"
