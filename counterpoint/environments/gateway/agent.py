"""`agent`: a program is run for each rollout and plays it through the gateway; it is trained unchanged.

The program finds the endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY`, or `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`, and
the example as JSON on its standard input. Its end is the rollout's. The reward is what `score` says, else the last line of the
program's standard output or, where the job asks for that, what it wrote to the file `AGENT_REWARD_FILE`, or gave its turns.
`docs/gateway.md` explains its use.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from counterpoint.environments.base import EnvironmentContext, Example, Model, Score
from counterpoint.environments.data.load import load_rows
from counterpoint.environments.data.rows import DataError, unwritable
from counterpoint.environments.gateway.agent_process import AgentResult, run_agent, started
from counterpoint.environments.gateway.responses import MODEL
from counterpoint.environments.gateway.server import Gateway
from counterpoint.environments.gateway.session import Limits
from counterpoint.environments.gateway.warm import WarmProgram
from counterpoint.environments.import_path import check_allowed, import_advice, import_module
from counterpoint.environments.reward import Reward, number_in
from counterpoint.transport.exact_json import dumps
from counterpoint.transport.files.untrusted import read_bytes
from counterpoint.transport.records import Rollout

PASSED_ON = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER")
"""Variables of the orchestrator's environment that an agent gets without being named."""

_MOST_REWARD_BYTES = 4096
_SHOWN_ERRORS = 1500
"""Characters of an agent's standard error in a failed rollout's message."""


class AgentEnvironment:
    """Runs a command for each rollout, as an agent that only knows a base URL."""

    group_scoring = False
    state_keys: tuple[str, ...] | None
    """None where a function scores, which may put in its own."""
    reward_bounds: tuple[float, float] | None
    """0 to 1 where the agent says its reward: a command that the model asked for may say it in its place."""

    def __init__(
        self,
        command: Sequence[str],
        data: Mapping[str, Any],
        variables: Mapping[str, str] | None = None,
        pass_on: Sequence[str] = (),
        directory: str | None = None,
        score: str | None = None,
        agent_sampling: bool = False,
        reward_file: bool = False,
        requests_waiting: int = 1024,
        warm: bool = False,
        turn_rewards: bool = False,
    ) -> None:
        """Checks the arguments.

        `command` is a program and its arguments; those that are paths of existing files may be relative. `data` (see
        `docs/data.md`) has a column `prompt`, and may have `answer` and any others. `variables` are set in the agent's
        environment, and `pass_on` names those of this process's that it gets besides `PASSED_ON`. It runs in `directory`, or
        in a new one for each rollout. `score` is an import path, `module:function`, of a function of an example and a
        rollout. With `agent_sampling` the agent's own sampling parameters are used. With `reward_file` the agent is given the
        path of a file for its reward, as is whatever it starts. Of a rollout's requests 64 are answered at once, and
        `requests_waiting` wait for that; more are refused. With `warm` the command is a Python interpreter and a file, and each
        rollout is a fork of a process that has imported what the file imports at its top. With `turn_rewards` the agent, and
        whatever it starts, may give its turns rewards at the gateway.
        """
        for name, value in (("warm", warm), ("turn_rewards", turn_rewards)):
            if not isinstance(value, bool):
                raise ValueError(f"{name} = {value!r}: expected true or false")
        if type(requests_waiting) is not int or requests_waiting < 0:
            raise ValueError(f"requests_waiting = {requests_waiting!r}: expected a whole number of at least 0")
        if isinstance(command, str) or not command or not all(isinstance(part, str) for part in command):
            raise ValueError(f"command = {command!r}: expected a list of texts, the program first")
        self._command = _found(command)
        self._rows = load_rows(data)
        self.fingerprint = self._rows.fingerprint
        self.weights = self._rows.weights
        self._directory = None if directory is None else Path(directory).resolve(strict=True)
        self._variables = _environment(variables or {}, pass_on)
        self._warm = WarmProgram(self._command, self._variables, self._directory) if warm else None
        self._score = None if score is None else _imported(score)
        reported = ("exit_code", "output", "errors", "refused", "reward", "times")
        self.state_keys = reported if self._score is None else None
        self.reward_bounds = (0.0, 1.0) if self._score is None and not turn_rewards else None
        self._reward_file = reward_file
        self._gateway = Gateway(
            Limits(requests_waiting=requests_waiting), agent_sampling=agent_sampling, turn_rewards=turn_rewards
        )

    async def start(self, context: EnvironmentContext) -> None:
        """See `Environment`."""
        if self._warm is not None:
            await self._warm.start()

    async def close(self) -> None:
        """See `Environment`."""
        if self._warm is not None:
            await self._warm.close()
        await self._gateway.close()

    def __len__(self) -> int:
        return len(self._rows)

    def example(self, index: int) -> Example:
        """See `Environment`."""
        row = self._rows[index]
        prompt, answer = row.get("prompt"), row.get("answer")
        answer = "" if answer is None else answer
        if not isinstance(prompt, str):
            raise DataError(f"{self._rows.where(index)}: prompt is {prompt!r:.80}; expected text")
        for name, value in row.items():
            if found := unwritable(value):
                raise DataError(
                    f"{self._rows.where(index)}: the column {name!r} has {found}, which the agent cannot be given as JSON; leave "
                    "it out, with `columns`"
                )
        info = {name: value for name, value in row.items() if name not in ("prompt", "answer")}
        return Example(index, prompt, answer if isinstance(answer, str) else dumps(answer).decode(), info)

    async def rollout(self, example: Example, model: Model, state: dict[str, Any]) -> None:
        """Runs the agent. Raises `RuntimeError` if it fails, or makes no model call."""
        own = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="counterpoint-agent-"))
        try:
            async with self._gateway.session(model) as session:
                given = own / "example.json"
                given.write_bytes(dumps(self._shown(example)) + b"\n")
                work = own / "work"
                work.mkdir()
                variables = self._variables | {
                    "OPENAI_BASE_URL": session.base_url,
                    "OPENAI_API_KEY": session.api_key,
                    "ANTHROPIC_BASE_URL": session.anthropic_url,
                    "ANTHROPIC_API_KEY": session.api_key,
                    "AGENT_EXAMPLE_FILE": str(given),
                    "TMPDIR": str(own),
                }
                if self._reward_file:
                    variables["AGENT_REWARD_FILE"] = str(own / "reward")
                begun = time.monotonic()
                result = await self._run(variables, self._directory or work, given)
                state |= {"exit_code": result.exit_code, "output": result.output, "errors": result.errors}
                state |= {"refused": list(session.errors), "times": session.times.metrics(begun)}
                _check(result, calls=len(session.turns), refused=state["refused"])
            if self._score is None:
                file = own / "reward" if self._reward_file else None
                state["reward"] = _reward(file, result.output, is_needed=not session.has_rewards)
        finally:
            await asyncio.to_thread(shutil.rmtree, own, ignore_errors=True)

    async def score(self, example: Example, rollout: Rollout) -> Score:
        """Returns what `score` says, or the reward that the agent reported. The program's times are metrics."""
        rollout.metrics |= rollout.state["times"]
        if self._score is None:
            said: float | None = rollout.state["reward"]
            return Reward() if said is None else said
        scored: Any = self._score(example, rollout)
        reward: Score = await scored if inspect.isawaitable(scored) else scored
        return reward

    async def score_group(self, example: Example, rollouts: Sequence[Rollout]) -> Sequence[Score]:
        """See `Environment`."""
        raise NotImplementedError("agent scores each rollout by itself")

    async def _run(self, variables: Mapping[str, str], directory: Path, given: Path) -> AgentResult:
        if self._warm is not None:
            return await self._warm.run(variables, directory, given)
        return await run_agent(started(self._command, variables, directory), given)

    def _shown(self, example: Example) -> dict[str, Any]:
        """The example as the agent gets it: with its answer only where the agent itself is to judge."""
        shown: dict[str, Any] = {"index": example.index, "prompt": example.prompt, "info": example.info}
        return shown if self._score is not None else shown | {"answer": example.answer}


class AgentRefused(RuntimeError):
    """The agent failed, and no request of it was answered: its newest was one that no repetition would make right."""


def _check(result: AgentResult, *, calls: int, refused: Sequence[str]) -> None:
    if result.flooded:
        raise RuntimeError("the agent wrote more than 16 MiB to its output and was killed")
    # One that was answered before or after may have failed for anything else, or have asked what it would not ask again.
    kind = AgentRefused if not calls and refused and refused[-1].startswith("400:") else RuntimeError
    if result.exit_code:
        ended = f"by signal {-result.exit_code}" if result.exit_code < 0 else f"with exit code {result.exit_code}"
        requests = f" Its newest refused request: {refused[-1]}" if refused else ""
        if "KeyError: 'AGENT_REWARD_FILE'" in result.errors:
            requests += " args.reward_file = true gives it that file."
        raise kind(f"the agent ended {ended}.{requests} Its errors: {result.errors[-_SHOWN_ERRORS:].strip()}")
    if not calls:
        requests = f"; its newest request was refused: {refused[-1]}" if refused else ""
        raise kind(
            f"the agent ended without a call of the model{requests}; it must use OPENAI_BASE_URL or ANTHROPIC_BASE_URL"
        )


def _reward(file: Path | None, output: str, *, is_needed: bool = True) -> float | None:
    """Returns the reward in the last line of the output, and in the file if there is one. Raises `ValueError` if they differ.

    None if neither has one, and none is needed.
    """
    line = output.strip().rpartition("\n")[2]
    said = {"the last line of the agent's output": line}
    if file is not None:
        with suppress(FileNotFoundError):
            written = read_bytes(file, _MOST_REWARD_BYTES).decode(errors="replace")
            said = {"AGENT_REWARD_FILE": written} | (said if _is_number(line) else {})
            is_needed = True
    if not (is_needed or _is_number(line)):
        return None
    rewards = {where: number_in(text) for where, text in said.items()}
    for where, text in said.items():
        if rewards[where] is None:
            raise ValueError(f"{where} is {text[:200]!r}; expected the reward, a number such as 0.5")
    reward, *others = {reward for reward in rewards.values() if reward is not None}
    if others:
        raise ValueError(
            f"the agent said two rewards: {said}. Print the reward alone as the last line, or nothing that is a number"
        )
    return reward


def _is_number(text: str) -> bool:
    """Whether Python reads a number in a text, which `number_in` may refuse."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def _found(command: Sequence[str]) -> list[str]:
    """The command with absolute paths: it runs in another directory."""
    program = shutil.which(command[0])
    if program is None:
        raise ValueError(f"command: there is no program {command[0]!r} on PATH or at that path")
    return [
        os.path.abspath(program),
        *(os.path.abspath(part) if os.path.isfile(part) else part for part in command[1:]),
    ]


def _environment(variables: Mapping[str, str], pass_on: Sequence[str]) -> dict[str, str]:
    if isinstance(pass_on, str) or not all(isinstance(name, str) for name in pass_on):
        raise ValueError(f"pass_on = {pass_on!r}: expected a list of names of environment variables")
    if missing := [name for name in pass_on if name not in os.environ]:
        raise ValueError(f"pass_on: {', '.join(missing)}: not set in the orchestrator's environment")
    inherited = {name: os.environ[name] for name in (*PASSED_ON, *pass_on) if name in os.environ}
    # The endpoint is on this machine, whatever proxy the agent is given. OpenAI's Agents SDK would send what it sees to OpenAI.
    fixed = {"NO_PROXY": "127.0.0.1,localhost", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
    named = dict.fromkeys(("OPENAI_MODEL", "OPENAI_DEFAULT_MODEL", "ANTHROPIC_MODEL"), MODEL)
    return {**inherited, **fixed, **{name: str(value) for name, value in variables.items()}, **named}


def _imported(path: str) -> Callable[[Example, Rollout], Any]:
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"score = {path!r}: expected an import path, package.module:function")
    check_allowed(path, "score")
    try:
        found: Callable[[Example, Rollout], Any] | None = getattr(import_module(module_name), name, None)
    except (Exception, SystemExit) as error:  # an operator's module may fail in any way while it is imported
        raise ValueError(
            f"score = {path!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
            f"{import_advice(module_name, error)}"
        ) from error
    if found is None or not callable(found):
        raise ValueError(f"score = {path!r}: {module_name} has no function {name!r}")
    return found
