"""What the soak says of series that are flat and of those that grow, what it finds of a process, and its server's answers."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from counterpoint.inference import wire
from counterpoint.inference.base import GenerateRequest, SamplingParameters
from counterpoint.inference.loads import LoadClaim, Origin
from perf.soak.answering import LETTERS, WholeJobAnswers
from perf.soak.growth import growths
from perf.soak.held import COUNTING, files_below, held_below
from tests.support.fake_inference import weight_update


def samples(*measures: tuple[str, str, Any]) -> list[dict[str, Any]]:
    """Samples of 2,000 steps, by a function of the step for each measure of a process."""
    return [
        {
            "step": step,
            "time": float(step),
            "held": [[process, measure, value(step)] for process, measure, value in measures],
        }
        for step in range(0, 2001, 10)
    ]


def test_what_grows_after_the_first_tenth_is_told_from_what_is_flat() -> None:
    found = {
        (each.process, each.measure): each
        for each in growths(
            samples(
                ("daemon", "resident MB", lambda step: 100.0 + min(step, 150) / 10),
                ("daemon", "blocks", lambda step: 1e5 + 50 * step),
                ("daemon", "descriptors", lambda step: 20 + step % 3),
                ("job's directory", "MB", lambda step: step),
            )
        )
    }
    assert [key for key, each in found.items() if not each.is_flat] == [("daemon", "blocks")]
    grown = found["daemon", "blocks"]
    assert round(grown.per_1000) == 50_000
    assert grown.first < 1e5 + 50 * 500 < 1e5 + 50 * 1700 < grown.last
    assert abs(found["daemon", "resident MB"].per_1000) < 1e-9


def test_a_process_that_is_gone_at_the_end_is_left_out() -> None:
    seen = samples(("daemon", "threads", lambda step: 3), ("helper", "threads", lambda step: 1))
    for sample in seen[150:]:
        del sample["held"][1]
    assert {each.process for each in growths(seen)} == {"daemon"}


def test_a_process_is_found_with_what_it_holds(tmp_path: Path) -> None:
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (tmp_path / str(process.pid)).write_text('{"blocks": 12345, "heap used MB": 1.5}')
        held = held_below(process.pid, tmp_path)
        assert held == {}, "nothing is below it"
        mine = held_below(os.getpid(), tmp_path)
        process.communicate()
    values = {
        measure: value
        for (_, measure), value in mine.items()
        if measure in ("blocks", "heap used MB", "resident MB", "threads")
    }
    assert (values["blocks"], values["heap used MB"]) == (12345, 1.5)
    assert values["resident MB"] > 1
    assert values["threads"] >= 1


def test_a_process_counts_its_blocks_and_its_heap(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(COUNTING)
    program = """
import json, sitecustomize
before = sitecustomize.counts()
kept = [bytes(2000) for _ in range(5000)]
print(json.dumps([before, sitecustomize.counts()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=True,
        cwd=tmp_path,
    )
    before, after = orjson.loads(done.stdout)
    assert after["blocks"] - before["blocks"] >= 5000
    assert 9 < after["heap used MB"] - before["heap used MB"] < 12
    assert after["heap free MB"] >= 0


def test_files_are_counted_with_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(bytes(1_000_000))
    (tmp_path / "c").touch()
    assert files_below(tmp_path) == {"files": 2, "MB": 1.0}


def test_the_server_passes_the_probe_of_any_weights_and_says_whose_they_are(tmp_path: Path) -> None:
    answers = WholeJobAnswers()

    def posted(path: str, fields: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = orjson.loads(
            b"".join(answers.to(path, orjson.dumps(fields))).partition(b"\r\n\r\n")[2]
        )
        return answer

    update = weight_update(7, "run")
    (tmp_path / "probe.json").write_bytes(orjson.dumps(asdict(update.probe)))
    claim = LoadClaim("key", "a test").encode()
    held = posted(wire.UPDATE_PATH, {"directory": str(tmp_path), "adapter": "run", "version": 7, "claim": claim})[
        "held"
    ]
    assert held["layers"] == update.probe.digests["float32"]
    probed = posted(wire.PROBE_PATH, {"model": "run", "token_ids": update.probe.token_ids})
    assert probed["log_probabilities"] == update.probe.log_probabilities
    assert Origin.decode(probed["weights"]).last == held["load"]
    asked = GenerateRequest("run", np.arange(3, dtype=np.int32), SamplingParameters(temperature=1.0, max_tokens=4))
    body = b"".join(answers.to(wire.GENERATE_PATH, wire.encode_request(asked))).partition(b"\r\n\r\n")[2]
    completion = wire.decode_completion(body)
    assert completion.echo == asked.echo
    assert 1 <= len(completion.token_ids) <= 4
    assert all(LETTERS[0] <= token < LETTERS[1] for token in completion.token_ids)
