"""The reference system's pickled rollouts: every known way to write them gives the same turns; a bad rollout costs itself."""

from __future__ import annotations

import base64
import pickle
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from counterpoint.job.replay.import_dump import ImportedRollouts
from counterpoint.orchestrator.rollouts.dump import DumpError, open_dump, write_dump
from counterpoint.orchestrator.rollouts.trajectories import merge_rollout
from counterpoint.orchestrator.step.finalize import find_fault
from counterpoint.transport.records import Rollout

LAYERS, TOP_K = 2, 3


def routing(rows: int, experts: int = 200) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(rows * LAYERS * TOP_K).reshape(rows, LAYERS, TOP_K) % experts


def make_step(
    prompt: list[int], completion: list[int], routed_experts: object = None, **changes: Any
) -> dict[str, Any]:
    tokens = {
        "prompt_ids": prompt,
        "prompt_mask": [0] * len(prompt),
        "completion_ids": completion,
        "completion_mask": [1] * len(completion),
        "completion_logprobs": [-0.5] * len(completion),
        "overlong_prompt": False,
        "is_truncated": False,
        "routed_experts": routed_experts,
    }
    return {
        "prompt": [{"role": "user", "content": "ü"}],
        "completion": [{"role": "assistant", "content": "x"}],
        "response": None,
        "tokens": tokens | changes,
        "reward": None,
        "advantage": None,
        "is_truncated": False,
        "trajectory_id": "abc",
        "extras": {},
    }


def make_output(example_id: object = 0, **changes: Any) -> dict[str, Any]:
    """A completed rollout of two turns, the second of which extends the first."""
    steps = [
        make_step([1, 2], [3, 4], routing(3).tolist()),
        make_step([1, 2, 3, 4, 5], [6], routing(5).tolist(), is_truncated=True),
    ]
    return {
        "example_id": example_id,
        "task": "wordle",
        "prompt": [],
        "completion": [],
        "reward": 0.5,
        "metrics": {"turns": 2, "share": 0.25, "odd": "x", "infinite": float("inf")},
        "error": None,
        "timing": {"total_ms": 3.0},
        "trajectory": steps,
    } | changes


def imported(path: Path, outputs: object, protocol: int = 4) -> tuple[ImportedRollouts, list[Rollout]]:
    path.write_bytes(pickle.dumps(outputs, protocol))
    source = ImportedRollouts(path)
    return source, list(source.rollouts())


def unread(tmp_path: Path, output: object) -> str:
    """Why `output` cannot be read, beside one that can."""
    source, (good, bad) = imported(tmp_path / "some.pkl", [make_output(), output])
    assert good.error is None
    ((position, reason),) = source.unreadable
    assert position == 1
    assert bad.error == f"could not be imported: {reason}"
    return reason


def test_what_becomes_of_each_field(tmp_path: Path) -> None:
    outputs = [
        make_output(7, advantage=-0.25),
        make_output("name", task="other"),
        make_output(7, error={"error": "ToolError", "error_chain_str": "ToolError: no answer"}, reward=None),
        make_output(8, error="broke", trajectory=[]),
        make_output(None, task=None),
    ]
    source, rollouts = imported(tmp_path / "some.pkl", outputs)
    assert source.unreadable == []
    assert dict(source.left_out) == {}
    assert [(r.rollout_id, r.group_id, r.environment, r.example_index) for r in rollouts] == [
        ("0-0", 0, "wordle", 7), ("1-1", 1, "other", 1), ("0-2", 0, "wordle", 7), ("2-3", 2, "wordle", 8),
        ("3-4", 3, "imported", 3),
    ]  # fmt: skip
    assert [r.error for r in rollouts] == [None, None, "ToolError; ToolError: no answer", "broke", None]
    first = rollouts[0]
    assert (first.reward, first.advantage, first.metrics) == (0.5, -0.25, {"turns": 2.0, "share": 0.25})
    assert [turn.prompt_ids.tolist() for turn in first.turns] == [[1, 2], [1, 2, 3, 4, 5]]
    assert [turn.completion_ids.tolist() for turn in first.turns] == [[3, 4], [6]]
    assert [turn.finish_reason for turn in first.turns] == ["stop", "length"]
    assert first.turns[0].log_probabilities.tolist() == [-0.5, -0.5]
    assert first.turns[0].policy_version == 0
    assert len(rollouts[2].turns) == 2
    assert source.header.state_columns == {"imported": [], "other": [], "wordle": []}
    assert source.header.shipped == 5


def test_environments_of_one_task_are_groups_of_their_own(tmp_path: Path) -> None:
    names = [("math", "default"), ("code", "default"), ("math", "default"), ("", "default"), (None, None), (7, None)]
    source, rollouts = imported(
        tmp_path / "some.pkl", [make_output(0, env_name=name, task=task) for name, task in names]
    )
    assert dict(source.left_out) == {}
    assert [(r.environment, r.group_id) for r in rollouts] == [
        ("math", 0), ("code", 1), ("math", 0), ("default", 2), ("imported", 3), ("imported", 3),
    ]  # fmt: skip


def payload(rows: np.ndarray[Any, Any], start: int = 0, text: bool = False) -> dict[str, Any]:
    data = rows.tobytes()
    return {"data": base64.b64encode(data).decode() if text else data, "shape": list(rows.shape), "start": start}


FORMS: dict[str, Callable[[np.ndarray[Any, Any]], object]] = {
    "lists": lambda rows: rows.tolist(),
    "uint8": lambda rows: rows.astype(np.uint8),
    "int32": lambda rows: rows.astype(np.int32),
    "big-endian": lambda rows: rows.astype(">u2"),
    "payload": lambda rows: payload(rows.astype(np.uint8)),
    "payload of int32": lambda rows: payload(rows.astype(np.int32)),
    "payload in base64": lambda rows: payload(rows.astype(np.uint16), text=True),
}


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("more", [0, 1], ids=["without the last token", "with it"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_routing(tmp_path: Path, form: str, more: int, protocol: int) -> None:
    steps = [
        make_step([1, 2], [3, 4], FORMS[form](routing(3 + more))),
        make_step([9], [8], FORMS[form](routing(1 + more))),
    ]
    source, (rollout,) = imported(tmp_path / "some.pkl", [make_output(trajectory=steps)], protocol)
    assert source.unreadable == []
    for turn, rows in zip(rollout.turns, (3, 1), strict=True):
        assert turn.routed_experts is not None
        assert turn.routed_experts.dtype == np.uint8
        np.testing.assert_array_equal(turn.routed_experts, routing(rows))
    assert len(merge_rollout(rollout)) == 2


def test_routing_that_begins_later(tmp_path: Path) -> None:
    later = payload(routing(5)[3:].astype(np.uint8), start=3)
    steps = [make_step([1, 2], [3, 4], routing(3).tolist()), make_step([1, 2, 3, 4, 5], [6], later)]
    _, (rollout,) = imported(tmp_path / "some.pkl", [make_output(trajectory=steps)])
    assert rollout.turns[1].routed_experts_start == 3
    (sample,) = merge_rollout(rollout)
    np.testing.assert_array_equal(np.concatenate(sample.routed_experts), routing(5))


def test_many_experts_make_all_of_a_rollout_uint16(tmp_path: Path) -> None:
    steps = [make_step([1, 2], [3, 4], routing(3).tolist()), make_step([9], [8], routing(1, 500) + 400)]
    _, (rollout,) = imported(tmp_path / "some.pkl", [make_output(trajectory=steps)])
    assert rollout.error is None
    assert [turn.routed_experts.dtype for turn in rollout.turns if turn.routed_experts is not None] == [np.uint16] * 2


def test_tokens_may_be_arrays(tmp_path: Path) -> None:
    step = make_step(
        [],
        [],
        prompt_ids=np.array([1, 2]),
        completion_ids=np.array([3], np.int32),
        completion_logprobs=np.array([-1.0]),
        completion_mask=np.array([False]),
    )
    _, (rollout,) = imported(tmp_path / "some.pkl", [make_output(trajectory=[step])])
    assert rollout.error is None
    assert rollout.turns[0].untrained == b"\1"
    assert find_fault(rollout) is None


def test_a_class_of_the_reference_is_read_as_a_dictionary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = type("RolloutOutput", (dict,), {"__module__": "verifiers.types"})
    for name in ("verifiers", "verifiers.types"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["verifiers.types"], "RolloutOutput", output, raising=False)
    for protocol in (0, 2, 4):
        _, (rollout,) = imported(tmp_path / "some.pkl", [output(make_output())], protocol)
        assert len(rollout.turns) == 2


def test_what_has_no_place_is_counted(tmp_path: Path) -> None:
    steps = [
        make_step([1], [2, 3], completion_mask=[1, 0], novelty=1),
        {"tokens": None, "surprise": 1},
        make_step([1], [2], temperature=1.0),
    ]
    outputs = [make_output(trajectory=steps, gadget=[1]), make_output(gadget={})]
    source, rollouts = imported(tmp_path / "some.pkl", outputs)
    assert [bytes(turn.untrained) for turn in rollouts[0].turns] == [b"\0\1", b""]
    assert dict(source.left_out) == {
        "rollout.gadget": 2, "step.surprise": 1, "step without tokens": 1, "tokens.novelty": 1, "tokens.temperature": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (None, "the rollout is a NoneType; expected a dictionary"),
        ({}, "trajectory is a NoneType; expected a list"),
        (make_output(trajectory=[]), "it ended without any turn"),
        (make_output(reward=None), "the reward is None"),
        (make_output(reward="high"), "reward is 'high'; expected a finite number"),
        (make_output(reward=10**5000), "reward is a huge int; expected a finite number"),
        (make_output(trajectory=[3]), r"trajectory\[0\] is a int; expected a dictionary"),
        (make_output(trajectory=[make_step([], [2], prompt_ids=["1"])]), r"tokens.prompt_ids is not a list of numbers"),
        (make_output(trajectory=[make_step([2**31], [2])]), "prompt_ids is not a list of numbers"),
        (make_output(trajectory=[make_step([-1], [2])]), "turn 0: prompt_ids holds the token -1"),
        (make_output(trajectory=[make_step([], [2], prompt_ids=np.array([2**31]))]), "expected .tokens. of int32"),
        (make_output(trajectory=[make_step([1], [2], completion_logprobs=[None])]), "completion_logprobs is not a list"),
        (make_output(trajectory=[make_step([1], [2], completion_logprobs=[-1, -1])]), "2 log_probabilities for 1"),
        (make_output(trajectory=[make_step([1], [2], completion_logprobs=[0.5])]), r"log_probabilities\[0\] is 0.5"),
        (make_output(trajectory=[make_step([1], [2], routing(3))]), "has 3 rows from position 0 on, of 2 tokens; expected 1"),
        (make_output(trajectory=[make_step([1], [2], routing(1)), make_step([1], [2])]), "expected all or none"),
        (make_output(trajectory=[make_step([1], [2], routing(1) - 1)]), "no indices of experts; expected 0 to 65535"),
        (make_output(trajectory=[make_step([1], [2], routing(1)[0])]), r"has shape \(2, 3\)"),
        (make_output(trajectory=[make_step([1], [2], [[[0], [0, 1]]])]), "its lists differ in length"),
        (make_output(trajectory=[make_step([1], [2], [[0, 1]])]), "or in depth"),
        (make_output(trajectory=[make_step([1], [2], [[["a"]]])]), "routed_experts is not a list of numbers"),
        (make_output(trajectory=[make_step([1], [2], [[[2**16]]])]), "routed_experts is not a list of numbers"),
        (make_output(trajectory=[make_step([1], [2], "AAAA")]), "is a str; expected lists, an array or a dictionary"),
        (make_output(trajectory=[make_step([1], [2], {"data": "?", "shape": [1, 1, 1]})]), "is not base64"),
        (make_output(trajectory=[make_step([1], [2], {"data": b"abc", "shape": [1, 1, 2]})]), "for 3 bytes"),
        (make_output(trajectory=[make_step([1], [2], {"data": b"abc", "shape": [2**60] * 3})]), "expected .tokens, layers"),
        (make_output(trajectory=[make_step([1], [2], {"data": b"a", "shape": [1, 1, 1], "start": -1})]), "expected a position"),
        (make_output(trajectory=[make_step([1, 5], [2], {"data": b"a", "shape": [1, 1, 1], "start": 1})]), "rows 0 to 0"),
    ],
)  # fmt: skip
def test_a_rollout_that_cannot_be_read_is_failed_and_the_others_go_on(
    tmp_path: Path, output: object, said: str
) -> None:
    assert re.search(said, unread(tmp_path, output))


def test_a_list_that_contains_itself(tmp_path: Path) -> None:
    circle: list[Any] = []
    circle.append(circle)
    assert "differ in length, or in depth" in unread(
        tmp_path, make_output(trajectory=[make_step([1], [2], [[circle, 1]])])
    )
    assert "expected a finite number" in unread(tmp_path, make_output(reward=circle))


@pytest.mark.parametrize("held", [[], {}, "text", [1, 2], [{"example_id": 1}], None])
def test_another_file_is_refused(tmp_path: Path, held: object) -> None:
    path = tmp_path / "some.pkl"
    path.write_bytes(pickle.dumps(held))
    with pytest.raises(DumpError, match="expected a list of rollouts, dictionaries with a trajectory"):
        ImportedRollouts(path)


def test_a_file_that_repeats_itself_does_not_fill_the_disk(tmp_path: Path) -> None:
    step = make_step([1] * 100_000, [2])
    outputs = [make_output(trajectory=[step] * 1000)] * 1000
    path = tmp_path / "some.pkl"
    path.write_bytes(pickle.dumps(outputs))
    source = ImportedRollouts(path)
    with pytest.raises(DumpError, match="so often that a dump would be more than"):
        write_dump(tmp_path / "dump", source.header, source.rollouts())
    assert list(tmp_path.iterdir()) == [path]
    row = [[0] * 1000] * 1000
    reason = unread(tmp_path, make_output(trajectory=[make_step([1] * 1000, [2], [row] * 1000)]))
    assert "more than the file can hold" in reason


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    def import_dump(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "counterpoint.cli.main", "import-dump", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    file, out = tmp_path / "some.pkl", tmp_path / "dump"
    file.write_bytes(pickle.dumps([make_output(), make_output(1, gadget=1, reward=None)]))
    completed = import_dump(file, out)
    assert completed.returncode == 0, completed.stderr
    assert [line.split(" in ")[0] for line in completed.stdout.splitlines()] == [
        f"{out}: 2 rollouts, 4 turns, {open_dump(out).nbytes / 1e9:.3g} GB",
        "left out: rollout.gadget (1 times)",
        "imported as failed, since they could not be read: 1 rollouts",
        "  rollout 1: the reward is None; expected a finite number",
    ]
    assert [rollout.error is None for rollout in open_dump(out).rollouts()] == [True, False]

    file.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    for arguments, said in (
        ((file, out), "exists; choose another place"),
        ((file, tmp_path / "other"), "refused os.system"),
        ((tmp_path / "none.pkl", tmp_path / "other"), "none.pkl is not a file"),
    ):
        refused = import_dump(*arguments)
        assert refused.returncode == 2
        assert said in refused.stderr
        assert "Traceback" not in refused.stderr
    assert not (tmp_path / "other").exists()
