"""Cache and budget of several processes, some of which are killed at any moment."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from counterpoint.environments.rewards.judge.budget import Budget, BudgetExhausted, Cost
from counterpoint.environments.rewards.judge.cache import AnswerCache, JudgeAnswer, key_of
from counterpoint.environments.rewards.judge.config import BudgetConfig

WRITES = """
import sys
from pathlib import Path
from counterpoint.environments.rewards.judge.cache import AnswerCache, JudgeAnswer, key_of
cache = AnswerCache(Path(sys.argv[1]), 1000)
print("ready", flush=True)
while True:
    for index in range(20):
        cache.put(key_of({"n": index}), JudgeAnswer(f"answer {index} " + "x" * 100_000, index, None))
"""

PAYS = """
import sys
from pathlib import Path
from counterpoint.environments.rewards.judge.budget import Budget, BudgetExhausted, Cost
from counterpoint.environments.rewards.judge.config import BudgetConfig
budget = Budget(BudgetConfig(requests=200), Path(sys.argv[1]))
paid = 0
try:
    while True:
        budget.pay(Cost(1, 10))
        paid += 1
        budget.give_back(Cost(0, 4))
except BudgetExhausted:
    print(paid)
"""


def start(program: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_writer_leaves_whole_answers(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path, 1000)
    for _ in range(3):
        writers = [start(WRITES, tmp_path) for _ in range(2)]
        for writer in writers:
            with writer:
                assert writer.stdout is not None
                assert writer.stdout.readline() == "ready\n"
                while cache.get(key_of({"n": 0})) is None:
                    assert writer.poll() is None
                writer.kill()
    found = [cache.get(key_of({"n": index})) for index in range(20)]
    assert found[0] is not None
    for index, answer in enumerate(found):
        assert answer in (None, JudgeAnswer(f"answer {index} " + "x" * 100_000, index, None))


@pytest.mark.slow
def test_processes_share_a_budget(tmp_path: Path) -> None:
    payers = [start(PAYS, tmp_path / "budget.json") for _ in range(3)]
    paid = [int(payer.communicate(timeout=240)[0]) for payer in payers]
    assert sum(paid) == 200
    assert Budget(BudgetConfig(), tmp_path / "budget.json").spent() == Cost(200, 1200)


def test_a_cache_is_bounded_and_keeps_what_is_used(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path, 20)
    first = key_of({"n": 0})
    cache.put(first, JudgeAnswer("first"))
    for index in range(1, 100):
        cache.put(key_of({"n": index}), JudgeAnswer("another"))
        os.utime(
            tmp_path / first[:2] / f"{first}.json", (2e9, 2e9)
        )  # as `get` does, at a time that no clock can confuse
    assert cache.get(first) == JudgeAnswer("first")
    assert len(list(tmp_path.glob("*/*.json"))) <= 20 + 20 // 10 + 1


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"key": 1}', b'{"answer": {"text": 5}, "key": "K", "checksum": "x"}']
)
def test_a_damaged_answer_is_not_used(tmp_path: Path, content: bytes) -> None:
    cache = AnswerCache(tmp_path, 20)
    key = key_of({})
    cache.put(key, JudgeAnswer("well", 1, 2))
    path = tmp_path / key[:2] / f"{key}.json"
    assert cache.get(key) == JudgeAnswer("well", 1, 2)
    path.write_bytes(path.read_bytes().replace(b"well", b"lies"))
    assert cache.get(key) is None
    path.write_bytes(content.replace(b"K", key.encode()))
    assert cache.get(key) is None
    cache.put(key, JudgeAnswer("well"))
    assert cache.get(key) == JudgeAnswer("well")


def test_an_answer_of_before_models_were_noted_is_used(tmp_path: Path) -> None:
    cache, key = AnswerCache(tmp_path, 20), key_of({})
    former = {"text": "well", "prompt_tokens": 1, "completion_tokens": None}
    checksum = hashlib.blake2b(orjson.dumps(former), digest_size=8).hexdigest()
    path = tmp_path / key[:2] / f"{key}.json"
    path.parent.mkdir()
    path.write_bytes(orjson.dumps({"key": key, "checksum": checksum, "answer": former}))
    assert cache.get(key) == JudgeAnswer("well", 1)
    cache.put(key, JudgeAnswer("well", 1, model="m"))
    assert cache.get(key) == JudgeAnswer("well", 1, model="m")


def test_a_foreign_thing_in_an_answer_s_place_is_not_followed(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "cache", 20)
    key = key_of({})
    cache.put(key, JudgeAnswer("well"))
    path = tmp_path / "cache" / key[:2] / f"{key}.json"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert cache.get(key) is None


def test_a_full_disk_costs_an_answer_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("no directory")
    cache = AnswerCache(tmp_path / "cache", 20)
    cache.put(key_of({}), JudgeAnswer("well"))
    assert cache.get(key_of({})) is None
    assert "was not written" in caplog.text


def test_a_budget_of_one_process_without_a_file() -> None:
    budget = Budget(BudgetConfig(tokens=10), None)
    budget.pay(Cost(1, 8))
    with pytest.raises(BudgetExhausted, match="8 are spent, and the next request may take 3"):
        budget.pay(Cost(1, 3))
    budget.give_back(Cost(0, 5))
    budget.pay(Cost(1, 3))
    assert budget.spent() == Cost(2, 6)
