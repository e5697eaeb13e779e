"""Writes a new environment: a module that works as it is, its test, and a job that trains on it, to be changed by their owner."""

from __future__ import annotations

import keyword
import sys
from importlib.util import find_spec
from pathlib import Path

from counterpoint.transport.errors import UserError
from counterpoint.transport.files.atomic import write_atomically

_MODULE = '''\
"""`{name}`: the model adds two numbers, and may try a second time."""

import random

from counterpoint.environments import Example


class {class_name}:
    """Sums of two numbers up to `largest`."""

    group_scoring = False

    def __init__(self, largest=9, examples=100, seed=0):
        choose = random.Random(seed)
        self._pairs = [(choose.randint(0, largest), choose.randint(0, largest)) for _ in range(examples)]

    def __len__(self):
        return len(self._pairs)

    def example(self, index):
        left, right = self._pairs[index]
        return Example(index=index, prompt=f"{{left}} + {{right}} = ?", answer=str(left + right))

    async def rollout(self, example, model, state):
        """Plays one attempt. Each `model.generate` is a turn, whose tokens are trained."""
        state["tries"] = []
        prompt_ids = model.chat.start([{{"role": "user", "content": example.prompt}}])
        while True:
            turn = await model.generate(prompt_ids)
            state["tries"].append(model.chat.decode(turn.completion_ids).strip())
            if state["tries"][-1] == example.answer or len(state["tries"]) == 2:
                return
            prompt_ids = model.chat.extend(turn, [{{"role": "user", "content": "No. Try again."}}])

    async def score(self, example, rollout):
        """Returns 1 for the first try, 0.5 for the second, and up to a tenth for the share of digits."""
        tries = rollout.state["tries"]
        if tries[-1] == example.answer:
            return 1.0 if len(tries) == 1 else 0.5
        return 0.1 * sum(map(str.isdecimal, tries[-1])) / max(len(tries[-1]), 1)
'''

_TEST = '''\
"""Tests of `{name}`: pytest test_{name}.py"""

import asyncio

import pytest
from counterpoint.testing import Chat, play, write_tokenizer
from {name} import {class_name}


@pytest.fixture
def chat(tmp_path):
    """The tokenizer and the chat template of a built-in model."""
    write_tokenizer(tmp_path, longest=1024)
    return Chat(tmp_path)


@pytest.mark.parametrize(
    ("answers", "reward"),
    [(["right"], 1.0), (["7", "right"], 0.5), (["7", "8"], 0.1), (["what?", "no"], 0.0)],
)
def test_the_reward_of_a_game(chat, answers, reward):
    environment = {class_name}(largest=3)
    expected = environment.example(0).answer
    said = [expected if answer == "right" else answer for answer in answers]
    rollout = asyncio.run(play(environment, 0, chat, *said))
    assert rollout.reward == reward


def test_examples_are_the_same_every_time():
    assert {class_name}().example(3) == {class_name}().example(3)
'''

_JOB = """\
# Trains a tiny model on {name}:
#
#   counterpoint run {file}

output_dir = "outputs/{name}"
model = "tiny-dense"

[inference]
dtype = "float32"
max_model_len = 256

[trainer]
device = "cpu"
dtype = "float32"
max_tokens = 4096
threads = 1

[orchestrator]
run_id = "{name}"
steps = 40

[[orchestrator.environments]]
name = "{name}"
kind = "{name}:{class_name}"
args = {{ largest = 9 }}

[orchestrator.sampling]
max_tokens = 16

[orchestrator.schedule]
group_size = 8
rollouts_per_step = 64

[orchestrator.training]
learning_rate = 1e-4
warmup_steps = 5

# Played at the first and the last step and every 20th, and by `counterpoint eval`: sums of another seed.
[[orchestrator.evaluations]]
name = "other_sums"
interval = 20
examples = 50

[[orchestrator.evaluations.environments]]
name = "{name}"
kind = "{name}:{class_name}"
args = {{ largest = 9, seed = 1 }}
"""


def class_name(name: str) -> str:
    """Returns the class of the module `name`: `my_sums` has `MySums`."""
    return "".join(part.capitalize() for part in name.split("_"))


def _is_hidden(name: str, directory: Path) -> bool:
    """Whether a module of that name in `directory` would not be found, or would hide a file of pytest's or of ours."""
    spec = find_spec(name)
    elsewhere = spec is not None and (spec.origin is None or Path(spec.origin).parent != directory.absolute())
    return elsewhere or name in (*sys.stdlib_module_names, "counterpoint", "conftest")


def write_environment(name: str, directory: Path) -> list[Path]:
    """Writes a module, its test and its job, and returns their paths.

    Raises `UserError` for a name that is no module's, and if one of the files is there already; nothing is written then.
    """
    if (
        not name.isidentifier()
        or keyword.iskeyword(name)
        or name != name.lower()
        or not name.isascii()
        or name.startswith("_")
    ):
        raise UserError(
            f"{name!r} is no name of a module: lower-case letters, digits and _ are expected, a letter first"
        )
    if _is_hidden(name, directory):
        raise UserError(
            f"there is a module {name!r} already, and one of the two would hide the other: choose another name"
        )
    file = directory / f"{name}.toml"
    values = {"name": name, "class_name": class_name(name), "file": file.name}
    contents = {
        directory / f"{name}.py": _MODULE.format(**values),
        directory / f"test_{name}.py": _TEST.format(**values),
        file: _JOB.format(**values),
    }
    if present := [str(path) for path in (*contents, directory / name / "__init__.py") if path.exists()]:
        raise UserError(f"{', '.join(present)}: there already; choose another name or --directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in contents.items():
            write_atomically(path, text.encode())
    except OSError as error:
        raise UserError(f"{directory} cannot be written to: {error}") from None
    return list(contents)
