"""A rollout's tokens are held once, however many turns repeat them: while it is played, when it was finalized, and in files."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.environments.chat import Chat
from counterpoint.inference.base import SamplingParameters
from counterpoint.orchestrator.rollouts import trajectories
from counterpoint.orchestrator.rollouts.play import PolicyModel
from counterpoint.orchestrator.rollouts.rollout_file import read_rollouts, write_rollouts
from counterpoint.orchestrator.rollouts.trajectories import merge_rollout
from counterpoint.orchestrator.step.advantages import load_advantage
from counterpoint.orchestrator.step.finalize import Finalizer
from counterpoint.run.config import AdvantageConfig
from counterpoint.transport.records import Int32Array, Rollout, Turn
from tests.orchestrator.toy_model import make_toy_model
from tests.support.rollouts import make_rollout, make_turn

TURNS, REPLY, COMPLETION = 78, 300, 500
TOKENS = TURNS * (REPLY + COMPLETION)
INT32 = 4


class Server:
    """Writes `COMPLETION` tokens at each call."""

    async def generate(
        self, prompt_ids: Int32Array, sampling: SamplingParameters, *, affinity: str, routed_experts_start: int = 0
    ) -> Turn:
        return Turn(
            prompt_ids=prompt_ids.copy(),
            completion_ids=np.arange(COMPLETION, dtype=np.int32),
            log_probabilities=np.full(COMPLETION, -0.5, dtype=np.float32),
            policy_version=0,
            finish_reason="length",
        )


async def play(chat: Any = None) -> Rollout:
    """A conversation in which each prompt is the last one, its completion and a reply."""
    rollout = make_rollout(turns=[], reward=1.0)
    model = PolicyModel(rollout, chat, Server(), SamplingParameters(temperature=1.0, max_tokens=COMPLETION))
    prompt: Sequence[int] | Int32Array = np.arange(REPLY, dtype=np.int32)
    for _ in range(TURNS):
        turn = await model.generate(prompt)  # type: ignore[arg-type]
        prompt = np.concatenate([turn.prompt_ids, turn.completion_ids, np.arange(REPLY, dtype=np.int32)])
    model.close()
    return rollout


def finalized(*rollouts: Rollout) -> list[Rollout]:
    return list(Finalizer(load_advantage(AdvantageConfig()), [])(rollouts, False).rollouts)


async def test_memory_grows_with_the_tokens_while_a_rollout_is_played() -> None:
    await play()  # what is made once is made
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        rollout = await play()
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    log_probabilities = sum(turn.log_probabilities.nbytes for turn in rollout.turns)
    assert held <= 4.5 * TOKENS * INT32 + log_probabilities


async def test_each_token_is_held_and_written_once(tmp_path: Path) -> None:
    played = await play()
    (rollout,) = finalized(played)
    assert rollout.tokens is not None
    assert rollout.tokens.nbytes == TOKENS * INT32
    for turn, before in zip(rollout.turns, played.turns, strict=True):
        assert np.shares_memory(turn.prompt_ids, rollout.tokens)
        assert np.array_equal(turn.prompt_ids, before.prompt_ids)
        assert np.array_equal(turn.completion_ids, before.completion_ids)
        with pytest.raises(ValueError, match="read-only"):
            turn.prompt_ids[0] = 7
    path = tmp_path / "rollouts.bin"
    write_rollouts(path, [rollout])
    log_probabilities = sum(turn.log_probabilities.nbytes for turn in rollout.turns)
    assert path.stat().st_size <= TOKENS * INT32 + log_probabilities + 1000 * TURNS
    (read,) = read_rollouts(path)
    again = tmp_path / "again.bin"
    write_rollouts(again, [read])
    assert again.read_bytes() == path.read_bytes()
    (one,), (other,) = merge_rollout(rollout), merge_rollout(read)
    assert np.array_equal(one.token_ids_T, other.token_ids_T)
    assert np.array_equal(one.loss_mask_T, other.loss_mask_T)


async def test_a_rollout_that_failed_is_written_once_too(tmp_path: Path) -> None:
    played = await play()
    played.error = "the environment broke"
    (rollout,) = finalized(played)
    write_rollouts(tmp_path / "rollouts.bin", [rollout])
    assert (tmp_path / "rollouts.bin").stat().st_size <= 2 * TOKENS * INT32 + 1000 * TURNS
    (read,) = read_rollouts(tmp_path / "rollouts.bin")
    assert np.array_equal(read.turns[-1].prompt_ids, played.turns[-1].prompt_ids)


async def test_what_is_read_from_a_file_and_merged_is_written_as_it_was(tmp_path: Path) -> None:
    """Such rollouts are in the dump of a step whose groups waited in a checkpoint."""
    write_rollouts(tmp_path / "waiting.bin", finalized(await play()))
    read = read_rollouts(tmp_path / "waiting.bin")
    assert merge_rollout(read[0])
    write_rollouts(tmp_path / "dump.bin", read)
    assert (tmp_path / "dump.bin").read_bytes() == (tmp_path / "waiting.bin").read_bytes()


def test_turns_whose_arrays_are_malformed_are_written_as_they_are(tmp_path: Path) -> None:
    turn = make_turn([1, 2], [3])
    object.__setattr__(turn, "prompt_ids", np.array([[1, 2]], dtype=np.int32))
    (rollout,) = finalized(make_rollout(turns=[turn, make_turn([1], [2])]))
    assert rollout.error is not None
    assert "shape" in rollout.error
    write_rollouts(tmp_path / "rollouts.bin", [rollout])
    (read,) = read_rollouts(tmp_path / "rollouts.bin")
    assert read.turns[0].prompt_ids.shape == (1, 2)
    assert read.turns[1].completion_ids.tolist() == [2]


async def test_branches_are_built_while_the_rollout_is_played_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    played = await play()

    def refuse(branches: trajectories.OpenBranches, turn: Turn) -> None:
        raise AssertionError("its branches were built while it was played")

    monkeypatch.setattr(trajectories.OpenBranches, "add", refuse)
    (rollout,) = finalized(played)
    (sample,) = merge_rollout(rollout)
    assert len(sample.token_ids_T) == TOKENS
    assert np.shares_memory(sample.token_ids_T, rollout.tokens)


def test_a_long_conversation_is_extended_without_a_list_of_its_tokens(tmp_path: Path) -> None:
    chat = Chat(make_toy_model(tmp_path / "model"))
    tokens = 200_000
    turn = make_turn([300] * tokens, [301])
    reply = [{"role": "user", "content": "go on"}]
    chat.extend(turn, reply)
    tracemalloc.start()
    try:
        extended = chat.extend(turn, reply)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(extended) > tokens
    assert peak <= 3.5 * tokens * INT32
