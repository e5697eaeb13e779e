"""The program of a server that is started before its configuration is known."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from counterpoint.inference import early_program, server
from counterpoint.inference.config import InferenceConfig
from counterpoint.inference.early_program import EarlyProgram, cpu_environment
from counterpoint.transport.process.child import run
from counterpoint.transport.telemetry.start_phases import VARIABLE

WAITS = """
import json, os, sys
from counterpoint.inference.plugin.program import take_order
before = dict(os.environ)
take_order()
print(json.dumps([sys.argv[1:], before, dict(os.environ), os.readlink("/proc/self/fd/0")]))
"""

SETTINGS = """
import json, os, sys
from counterpoint.inference.plugin import program

def settings():
    import torch
    print(json.dumps([sys.argv[1:], dict(os.environ), torch.get_num_threads(), torch.__config__.parallel_info()]))
    sys.stdout.flush()
    os._exit(0)

program._serve = settings
program.main()
"""


def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> EarlyProgram:
    """An early program that runs the given code, and writes into a file."""
    (tmp_path / "held.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(early_program, "PROGRAM", "held")
    output = os.open(tmp_path / "output", os.O_WRONLY | os.O_CREAT)
    with open(output, "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        early = EarlyProgram(["its file"])
    monkeypatch.undo()
    return early


def output(early: EarlyProgram, tmp_path: Path) -> Any:
    """What it printed, once it has ended."""
    with early.child as child:
        assert child.wait(60) == 0
    return json.loads((tmp_path / "output").read_text())


def test_an_order_brings_the_arguments_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOES", "1")
    monkeypatch.setenv("STAYS", "2")
    early = started(monkeypatch, tmp_path, WAITS)
    wanted = {**cpu_environment(), "STAYS": "2", "COMES": "tëst", "HF_HUB_OFFLINE": "1"}
    wanted.pop("GOES", None)
    assert early.ordered(["--model", "a b"], wanted) is early.child
    arguments, before, after, standard_input = output(early, tmp_path)
    assert arguments == ["--model", "a b"]
    assert before["GOES"] == "1"
    assert "GOES" not in after
    assert after["STAYS"] == "2"
    assert after["COMES"] == "tëst"
    assert after["TMPDIR"] == before["TMPDIR"], "its guardian's directory stays"
    assert standard_input == os.devnull


def test_without_an_order_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = started(monkeypatch, tmp_path, WAITS)
    early.child.stdin.close()
    with early.child as child:
        assert child.wait(20) == 0
    assert (tmp_path / "output").read_text() == ""


def test_one_that_has_ended_takes_no_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    early = started(monkeypatch, tmp_path, "raise SystemExit(3)")
    with early.child as child:
        assert child.wait(20) == 3
        assert early.ordered([], {}) is None


def test_only_the_command_of_a_job_s_server_on_a_cpu_starts_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[list[str]] = []

    class Recorded:
        def __init__(self, whose: list[str]) -> None:
            begun.append(whose)

        def end(self) -> None:
            begun.append(["ended"])

    monkeypatch.setattr(early_program, "EarlyProgram", Recorded)
    for in_job, on_cpu in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr(early_program, "on_cpu", lambda on_cpu=on_cpu: on_cpu)
        monkeypatch.setenv(VARIABLE, "inference_0=/nowhere") if in_job else monkeypatch.delenv(VARIABLE, raising=False)
        with early_program.early_program(["file.toml"]) as early:
            assert (early is not None) == (in_job and on_cpu)
    assert begun == [["file.toml"], ["ended"]]


@pytest.mark.slow
def test_torch_has_the_settings_that_it_has_in_a_program_that_starts_with_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTER_CORES", "0:2")
    environment = cpu_environment() | {"HF_HUB_OFFLINE": "1"}
    early = started(monkeypatch, tmp_path, SETTINGS)
    assert early.ordered(["--port", "1"], environment) is not None
    arguments, held, threads, parallel = output(early, tmp_path)
    command = [sys.executable, "-c", SETTINGS, "--port", "1"]
    ordinary = json.loads(run("the program", command, 60, environment=environment).output)
    assert [arguments, threads, parallel] == [ordinary[0], ordinary[2], ordinary[3]]
    own = {"TMPDIR", "PYTHONPATH"}
    assert {name: held[name] for name in held.keys() - own} == {
        name: ordinary[1][name] for name in ordinary[1].keys() - own
    }
    assert held["OMP_WAIT_POLICY"] == "PASSIVE"
    assert held["TORCHDYNAMO_DISABLE"] == "1"


@pytest.mark.parametrize("log", [None, "vllm.log"])
def test_a_server_whose_early_program_cannot_be_used_is_started_in_the_ordinary_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str | None
) -> None:
    early = started(monkeypatch, tmp_path, "import time\ntime.sleep(100)" if log else "raise SystemExit(3)")
    if not log:
        early.child.wait(20)
    monkeypatch.setattr(server, "server_command", lambda _: [sys.executable, "-c", "", "-m", early_program.PROGRAM])
    config = InferenceConfig(model=str(tmp_path), log_file=tmp_path / log if log else None)
    with server._start(config, dict(os.environ), early) as child:
        assert child is not early.child
        assert child.wait(20) == 0
    assert early.child.code is not None, "it does not keep its memory"
