"""The tasksets that come with the library: NeMo Gym's is played at a server of its API, the others say what they need."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from counterpoint.environments.chat import Chat
from counterpoint.environments.config import EnvironmentConfig
from counterpoint.environments.workers.load import load_environment
from tests.environments.verifiers_library.conftest import CallingModel, Running
from tests.environments.verifiers_library.test_environment import played

# The library is imported in three seconds.
pytestmark = pytest.mark.slow

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]},
}


@pytest.fixture
async def gym() -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A resource server by the API of NeMo Gym: a counter for each session. Yields its URL and what it was asked to verify."""
    sums: dict[str, int] = {}
    verified: list[dict[str, Any]] = []

    async def seed(request: web.Request) -> web.Response:
        response = web.json_response({})
        response.set_cookie("session", name := f"session-{len(sums)}")
        sums[name] = 0
        return response

    async def add(request: web.Request) -> web.Response:
        sums[request.cookies["session"]] += (await request.json())["amount"]
        return web.json_response({"sum": sums[request.cookies["session"]]})

    async def verify(request: web.Request) -> web.Response:
        asked = await request.json()
        verified.append(asked)
        right = sums[request.cookies["session"]] == asked["expected"]
        return web.json_response(asked | {"reward": float(right), "sum": sums[request.cookies["session"]]})

    app = web.Application()
    app.add_routes([web.post("/seed_session", seed), web.post("/add", add), web.post("/verify", verify)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield f"http://127.0.0.1:{port}", verified
    await runner.cleanup()


def dataset(directory: Path) -> str:
    row = {"responses_create_params": {"input": [{"role": "user", "content": "add 5"}], "tools": [ADD]}, "expected": 5}
    file = directory / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return str(file)


@pytest.mark.filterwarnings("ignore:The 'initial' parameter is deprecated")
async def test_nemo_gyms_tasks_are_played_at_their_server(
    tools_chat: Chat, running: Running, tmp_path: Path, gym: tuple[str, list[dict[str, Any]]]
) -> None:
    url, verified = gym
    taskset = {"dataset": dataset(tmp_path), "task": {"resources_url": url}}
    async with running("", id="nemo_gym", taskset=taskset) as environment:
        right = CallingModel(tools_chat, ['call add {"amount": 2}', 'call add {"amount": 3}', "done"])
        rollout = await played(environment, right)
        assert (rollout.reward, rollout.metrics["sum"]) == (1.0, 5.0)
        assert all(turn.trained_tokens for turn in rollout.turns)
        wrong = await played(environment, CallingModel(tools_chat, ["I will not"]))
        assert wrong.reward == 0.0
    calls = [item["name"] for item in verified[0]["response"]["output"] if item["type"] == "function_call"]
    assert calls == ["add", "add"]


def load(**arguments: Any) -> Any:
    return load_environment(EnvironmentConfig(name="mine", kind="verifiers", args=arguments))


@pytest.mark.parametrize(
    ("package", "arguments", "needs"),
    [
        ("harbor", {"id": "harbor"}, 'Python 3.12.*kind = "harbor"' if sys.version_info < (3, 12) else r"\[harbor\]"),
        ("openenv", {"id": "openenv", "taskset": {"env": "echo"}}, r"verifiers\[openenv\]"),
        (
            "textarena",
            {"id": "textarena", "taskset": {"game": "Hangman-v0"}, "select": {"limit": 3}},
            r"verifiers\[ta\]",
        ),
    ],
)
def test_a_taskset_says_which_package_it_needs(package: str, arguments: dict[str, Any], needs: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ValueError, match=needs):
        load(**arguments)


def test_openenv_says_which_program_starts_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "openenv" or real(name, *rest))
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ValueError, match="by uv"):
        load(id="openenv", taskset={"env": "echo"})
    with pytest.raises(ValueError, match="by docker"):
        load(id="openenv", taskset={"env": "echo", "use_docker": True})


async def test_a_server_that_is_missing_is_named_before_a_rollout(running: Running, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="resources_url"):
        load(id="nemo_gym", taskset={"dataset": dataset(tmp_path)})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listened at, so that nobody answers
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        taskset = {"dataset": dataset(tmp_path), "task": {"resources_url": url}}
        with pytest.raises(ValueError, match=url):
            async with running("", id="nemo-gym", taskset=taskset):
                pass
