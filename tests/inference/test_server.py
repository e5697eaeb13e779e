"""Starting and ending a server process, with a stand-in for vLLM where the real one would only take longer."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from counterpoint.inference import identity, server
from counterpoint.inference.config import InferenceConfig
from counterpoint.transport.process.cores import CORES_VARIABLE
from counterpoint.transport.process.launch import SHARED_TMPDIR, descendants, live_processes
from counterpoint.transport.process.parent_death import bound_command
from counterpoint.transport.process.permanent_errors import PASSING
from tests.support.notifications import notifications
from tests.support.polling import wait_until
from tests.support.ports import free_port, taken_port

HEALTHY = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"instance": "%s"}' % os.environ["COUNTERPOINT_INSTANCE"].encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + HEALTHY
SHARES_MEMORY = (
    """
import os, signal, sys, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
if os.fork() == 0:  # as vLLM's engine: it holds the memory, too, and does not end by itself
    time.sleep(600)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
"""
    + HEALTHY
)
DEAF = """
import http.server, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"instance": "%s"}' % os.environ["COUNTERPOINT_INSTANCE"].encode())
with http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler) as server:
    server.handle_request()
time.sleep(600)
"""
ANOTHERS = 'import os; os.environ["COUNTERPOINT_INSTANCE"] = "another"\n' + HEALTHY
LISTENS_LATE = """
import sys, time
from pathlib import Path
from counterpoint.inference import identity, server
from counterpoint.inference.config import InferenceConfig
wait = "import sys, time\\nfrom pathlib import Path\\nwhile not Path(sys.argv[2]).exists(): time.sleep(0.01)\\n"
server.server_command = lambda config: [sys.executable, "-c", wait + sys.argv[3], str(config.port), sys.argv[2]]
start = server._start
def say(*given):
    child = start(*given)
    print("started", flush=True)
    return child
server._start = say
config = InferenceConfig.model_validate_json(sys.argv[1])
sys.exit(server.serve(config, lambda: print("ready", flush=True)))
"""
"""As vLLM, which listens long after its start: when the file of the second argument is there."""
HEADS_OF_20 = {"model_type": "qwen3", "hidden_size": 80, "num_attention_heads": 4}
SILENT = "import time; time.sleep(600)"
SHORT_LIVED = "import sys; sys.exit(3)"


def config_of(tmp_path: Path, model: dict[str, Any] | None = None, **settings: Any) -> InferenceConfig:
    if model is not None:
        (tmp_path / "config.json").write_text(json.dumps(model))
    return InferenceConfig(model=str(tmp_path), **({"port": free_port(), "log_file": tmp_path / "log"} | settings))


def stand_in(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(server, "server_command", lambda config: [sys.executable, "-c", program, str(config.port)])


_OTHERS: set[int] = set()
"""Children that were there before the test: the vLLM that other tests share."""


@pytest.fixture(autouse=True)
def _children_of_other_tests() -> None:
    _OTHERS.clear()
    _OTHERS.update(children())


def children() -> list[int]:
    """The processes that the test has started and that still live."""
    return [pid for pid, _, parent, _ in live_processes() if parent == os.getpid() and pid not in _OTHERS]


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("program", [HEALTHY, STUBBORN])
def test_a_server_is_ready_when_it_is_healthy_and_ends_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    stand_in(monkeypatch, program)
    monkeypatch.setattr(server, "STOP_SECONDS", 0.3)
    before = signal.getsignal(signal.SIGTERM)
    beats: list[tuple[str, str]] = []

    def beat(trouble: str, phase: str) -> None:
        beats.append((trouble, phase))

    assert server.serve(config_of(tmp_path, {}), stop_this_process, beat) == 143
    assert set(beats) == {("", "")}
    assert children() == []
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_a_server_starts_where_there_can_be_no_temporary_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path, {})
    stand_in(monkeypatch, HEALTHY)
    monkeypatch.setenv("TMPDIR", "/nowhere")  # a long one is not taken
    monkeypatch.delenv(SHARED_TMPDIR, raising=False)
    assert server.serve(config, stop_this_process) == 143
    assert config.log_file is not None
    assert "no temporary directory for the command alone" in config.log_file.read_text()


@pytest.mark.slow
def test_an_engine_that_is_stopped_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, SHARES_MEMORY)
    monkeypatch.setattr(server, "PROCESS_CHECK_SECONDS", 0.0)
    config = config_of(tmp_path, {})
    told: list[str] = []

    def stop_engine() -> None:
        (guardian,) = children()
        _, *below = descendants(guardian)
        (engine,) = [pid for pid in below if b"tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(engine, signal.SIGSTOP)

    def beat(trouble: str, phase: str) -> None:
        told.append(trouble)
        if trouble:
            stop_this_process()

    assert server.serve(config, stop_engine, beat) == 143
    assert told[0] == ""
    assert re.fullmatch(r"vLLM does not run: process \d+ is stopped \(SIGSTOP\)", told[-1])
    assert children() == []


@pytest.mark.slow
def test_the_memory_that_a_server_shared_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, SHARES_MEMORY)
    config = config_of(tmp_path, {})
    assert server.serve(config, stop_this_process) == 143
    assert config.log_file is not None
    name = config.log_file.read_text().split()[0]
    assert name.startswith("psm_")
    assert not (Path("/dev/shm") / name).exists()
    assert children() == []


@pytest.mark.slow
def test_a_server_that_ends_by_itself_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, SHORT_LIVED)
    assert server.serve(config_of(tmp_path, {}), lambda: pytest.fail("it was never ready")) == server.EXIT_FAILED
    assert "ended with exit code 3 before it was ready; its output is in" in caplog.text


FAILS = "print('ValueError: of this start', flush=True); import sys; sys.exit(1)"
UNSUPPORTED = "print('RuntimeError: Unsupported head_dim=20', flush=True); import sys; sys.exit(1)"
KILLED = "import os; os.kill(os.getpid(), 9)"
KILLED_LATER = f"print('NotImplementedError: a faster path', flush=True); {KILLED}"
NEIGHBOUR = "print('OSError: [Errno 98] Address already in use', flush=True); import sys; sys.exit(1)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "code", "reason"),
    [
        (FAILS, 1, "did not start: ValueError: of this start; its output is in"),
        (UNSUPPORTED, 2, "did not start: RuntimeError: Unsupported head_dim=20; its output is in"),
        (KILLED, PASSING, "was killed by SIGKILL before it was ready, as the kernel does when memory is short"),
        (KILLED_LATER, PASSING, "was killed by SIGKILL before it was ready, as the kernel does when memory is short;"),
        (NEIGHBOUR, PASSING, "did not start: OSError: [Errno 98] Address already in use; its output is in"),
        ("import sys; sys.exit('api_server.py: error: unrecognized arguments: --nope')", 1, "arguments: --nope;"),
    ],
)
def test_the_supervisor_is_told_why_a_server_did_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, code: int, reason: str
) -> None:
    stand_in(monkeypatch, program)
    (tmp_path / "log").write_text("TypeError: of an earlier start\n")
    with notifications(monkeypatch) as said:
        assert server.serve(config_of(tmp_path, {}), lambda: pytest.fail("it was never ready")) == code
    (failure,) = [message["X_FAILURE"] for message in said if "X_FAILURE" in message]
    assert reason in failure


@pytest.mark.slow
def test_a_server_that_closes_its_port_and_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As vLLM 0.32 does when its engine is killed while an adapter is being loaded."""
    stand_in(monkeypatch, DEAF)
    monkeypatch.setattr(server, "NOT_LISTENING_SECONDS", 0.3)
    began: list[bool] = []
    assert server.serve(config_of(tmp_path, {}), lambda: began.append(True)) == server.EXIT_FAILED
    assert began == [True]
    assert "listens no more, and does not end: it is killed" in caplog.text
    assert children() == []


@pytest.mark.slow
def test_a_ready_server_on_a_name_of_two_addresses_lives_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM listens on the IPv4 address of a name. Looked for at the other one, it would be killed for being deaf."""
    stand_in(monkeypatch, HEALTHY)
    monkeypatch.setattr(server, "NOT_LISTENING_SECONDS", 0.0)
    monkeypatch.setattr(server, "PROCESS_CHECK_SECONDS", 0.0)
    beats: list[str] = []

    def beat(trouble: str, phase: str) -> None:
        beats.append(trouble)
        if len(beats) == 4:
            stop_this_process()

    with addresses(monkeypatch, "localhost", "::1", "127.0.0.1"):
        assert server.serve(config_of(tmp_path, {}, host="localhost"), lambda: None, beat) == 143
    assert len(beats) >= 4


def test_vllm_is_given_the_address_that_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with addresses(monkeypatch, "both", "::1", "127.0.0.1"):
        assert server.address_of("both") == "127.0.0.1"
    with addresses(monkeypatch, "only-six", "::1"):
        assert server.address_of("only-six") == "::1"
    assert [server.address_of(host) for host in ("0.0.0.0", "::", "127.0.0.2")] == ["0.0.0.0", "::", "127.0.0.2"]


@contextmanager
def addresses(monkeypatch: pytest.MonkeyPatch, name: str, *found: str) -> Iterator[None]:
    """A name server that answers `name` with these, in this order."""
    ask = socket.getaddrinfo

    def answer(host: Any, *arguments: Any, **named: Any) -> list[Any]:
        hosts = found if host == name else [host]
        return [result for each in hosts for result in ask(each, *arguments, **named)]

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", answer)
        yield


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, SILENT)
    config = config_of(tmp_path, {}, startup_timeout_seconds=0.1)
    assert server.serve(config, lambda: pytest.fail("it was never ready")) == server.EXIT_FAILED
    assert "startup_timeout_seconds = 0.1" in caplog.text
    assert children() == []


def test_a_port_in_use_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("nothing may be started"))
    with taken_port() as port:
        config = config_of(tmp_path, {}, port=port)
        assert server.serve(config, lambda: None) == PASSING, "it may be free at the next attempt"
        assert (
            f"cannot listen on 127.0.0.1:{config.port}: Address already in use; stop what uses the port" in caplog.text
        )


@pytest.mark.slow
def test_the_second_of_two_jobs_on_one_port_is_refused_with_the_first_ones_name_before_either_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job, go = tmp_path / "first", tmp_path / "go"
    job.mkdir()
    config = config_of(tmp_path, {})
    command = [sys.executable, "-c", LISTENS_LATE, config.model_dump_json(), str(go), HEALTHY]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, cwd=job, env=environment, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        try:
            assert first.stdout.readline() == b"started\n"
            with monkeypatch.context() as patch:
                patch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("nothing may be started"))
                assert server.serve(config, lambda: None) == PASSING
            assert f"cannot listen on 127.0.0.1:{config.port}: process {first.pid} (" in caplog.text
            assert f"in {job}, has a server there, or starts one" in caplog.text
            go.touch()
            assert first.stdout.readline() == b"ready\n"
            first.terminate()
            assert first.wait() == 143
        finally:
            first.kill()
    stand_in(monkeypatch, HEALTHY)
    assert server.serve(config, stop_this_process) == 143, "the port is free again"


@pytest.mark.slow
def test_a_server_is_not_ready_because_another_one_answers_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, ANOTHERS)
    config = config_of(tmp_path, {}, startup_timeout_seconds=1.0)
    assert server.serve(config, lambda: pytest.fail("it was never ready")) == server.EXIT_FAILED
    assert "startup_timeout_seconds = 1" in caplog.text
    assert children() == []


def test_the_secret_of_a_job_is_in_no_command_line_no_variable_and_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    identity.make(file := tmp_path / "servers.key")
    secret = file.read_text().strip()
    identity.make(file)
    assert (file.read_text().strip(), file.stat().st_mode & 0o777) == (secret, 0o600)
    config = config_of(tmp_path, {}, identity_file=file)
    shown = [*server.server_command(config), *server.server_environment(config).values(), caplog.text]
    assert secret not in " ".join(shown)
    assert server.server_environment(config)[identity.VARIABLE] == str(file)
    assert server.server_environment(config_of(tmp_path, {})).get(identity.VARIABLE) is None


@pytest.mark.parametrize(
    ("model", "settings", "complaint"),
    [
        (None, {}, "there is no"),
        ([], {}, "holds a JSON list; expected an object"),
        (HEADS_OF_20, {}, "its attention heads have 20 dimensions (head_dim in its config.json)"),
        ({}, {"return_routed_experts": True}, "has no experts; remove the setting"),
        ({"num_experts": 8}, {"lora": {}}, "a mixture of experts, whose adapters vLLM cannot serve on a CPU"),
        ({}, {"api_key_file": Path("/nowhere/token")}, "api_key_file = '/nowhere/token': cannot be read: No such file"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    model: dict[str, Any] | None,
    settings: dict[str, Any],
    complaint: str,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("nothing may be started"))
    monkeypatch.setattr(server, "on_cpu", lambda: True)
    assert server.serve(config_of(tmp_path, model, **settings), lambda: None) == server.EXIT_BAD_CONFIG
    assert complaint in caplog.text


@pytest.mark.parametrize(
    ("on_cpu", "settings", "in_engine"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"tensor_parallel_size": 2}, False),
        (True, {"extra_args": ["--distributed-executor-backend=mp"]}, False),
    ],
)
def test_on_a_cpu_the_engine_computes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool, settings: dict[str, Any], in_engine: bool
) -> None:
    monkeypatch.setattr(server, "on_cpu", lambda: on_cpu)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    config = config_of(tmp_path, {}, **settings)
    assert ("uni" in server.server_command(config)) is in_engine
    environment = server.server_environment(config)
    assert ("VLLM_ENABLE_V1_MULTIPROCESSING" in environment) is in_engine
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == ("fork" if in_engine else "spawn")


def test_on_a_cpu_blocks_are_short_enough_that_a_prompt_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "on_cpu", lambda: True)
    command = server.server_command(config_of(tmp_path, {}))
    assert command[command.index("--block-size") + 1] == "32"
    for own in (["--block_size=64"], ["--block-size", "64"]):
        words = [
            word
            for word in server.server_command(config_of(tmp_path, {}, extra_args=own))
            if word.startswith("--block")
        ]
        assert words == own[:1], "the file decides"
    own = ["--config", "vllm.yaml"]
    assert "--block-size" not in server.server_command(config_of(tmp_path, {}, extra_args=own)), (
        "vLLM's file may say it"
    )
    monkeypatch.setattr(server, "on_cpu", lambda: False)
    assert "--block-size" not in server.server_command(config_of(tmp_path, {})), "on a GPU vLLM decides"


def test_one_backend_constrains_all_answers_unless_the_file_names_another(tmp_path: Path) -> None:
    flag = "--structured-outputs-config.backend"
    command = server.server_command(config_of(tmp_path, {}))
    assert command[command.index(flag) + 1] == "guidance"
    for own in ([flag, "xgrammar"], [f"{flag.replace('-', '_')}=xgrammar"], ["--config", "vllm.yaml"]):
        command = server.server_command(config_of(tmp_path, {}, extra_args=own))
        assert "guidance" not in command
        assert command[-len(own) :] == own


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "somewhere.example"])
def test_beyond_loopback_a_token_is_needed(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValidationError, match="set api_key_file, or listen on 127"):
        config_of(tmp_path, {}, host=host)
    config_of(tmp_path, {}, host=host, api_key_file=tmp_path / "token")


def test_the_token_is_in_no_command_line_and_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = tmp_path / "token"
    token.write_text("open sesame\n")
    config = config_of(tmp_path, {}, api_key_file=token)
    environment = server.server_environment(config)
    assert environment["COUNTERPOINT_API_KEY_FILE"] == str(token)
    assert "sesame" not in " ".join([*server.server_command(config), *environment.values()]) + caplog.text


@pytest.mark.parametrize("content", ["", "\n", "two\n\nlines\n", "x" * 5000, "many\n" * 9])
def test_a_file_that_holds_no_token_is_refused(tmp_path: Path, content: str) -> None:
    token = tmp_path / "token"
    token.write_text(content)
    with pytest.raises(ValueError, match="1 to 8 of them, each of 1 to 4096 ASCII"):
        server.server_environment(config_of(tmp_path, {}, api_key_file=token))


@pytest.mark.slow
def test_a_bound_process_dies_with_the_one_that_started_it() -> None:
    parent = f"""
import subprocess, time
from counterpoint.transport.process.parent_death import bound_command
child = subprocess.Popen(bound_command([{sys.executable!r}, "-c", {SILENT!r}]))
print(child.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.stdout.close()
    # The child must have become the program it was started for: before that it may not be bound yet.
    wait_until(lambda: b"time.sleep(600)" in Path(f"/proc/{child}/cmdline").read_bytes(), "the program's start")
    process.kill()
    process.wait()
    wait_until(lambda: child not in [pid for pid, *_ in live_processes()], "the child's end")


@pytest.mark.slow
def test_a_process_whose_parent_is_gone_already_does_not_start() -> None:
    command = bound_command([sys.executable, "-c", "print('started')"])
    command[4] = "-1"  # no process has this id, as if the one that forked it had died and another had taken over
    ended = subprocess.run(command, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGKILL, b"", b"")


def test_a_server_on_a_cpu_compiles_nothing_unless_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path, {})
    monkeypatch.setattr(server, "on_cpu", lambda: True)
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    switches = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
    assert [server.server_environment(config)[name] for name in switches] == ["1", "1"]
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    assert [server.server_environment(config)[name] for name in switches] == ["0", "0"]
    monkeypatch.setattr(server, "on_cpu", lambda: False)
    monkeypatch.delenv("TORCH_COMPILE_DISABLE")
    assert "TORCH_COMPILE_DISABLE" not in server.server_environment(config)


def test_a_server_on_a_cpu_has_the_threads_that_its_job_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8))
    monkeypatch.setenv(CORES_VARIABLE, "2:3")
    monkeypatch.setattr(server, "on_cpu", lambda: True)
    config = config_of(tmp_path, {})
    assert server.server_environment(config)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert server.server_environment(config)["OMP_NUM_THREADS"] == "5"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(server, "on_cpu", lambda: False)
    assert "OMP_NUM_THREADS" not in server.server_environment(config)


def test_what_vllm_does_before_it_is_ready_is_read_from_its_output(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("(EngineCore pid=1) INFO Capturing CUDA graphs of a former start\n")
    output = server._Output(config_of(tmp_path, {}).model_copy(update={"log_file": log}))
    found = []
    for line in (
        "(APIServer pid=7) INFO [model.py:733] Resolved architecture: Qwen3ForCausalLM",
        "(APIServer pid=7) WARNING Enforce eager set, disabling torch.compile, CUDAGraphs, and JIT kernel warmup.",
        "(EngineCore pid=9) INFO Starting to load model /models/m...",
        "Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:00<00:00, 20.06it/s]",
        "(EngineCore pid=9) INFO Using LBHNC KV cache layout.",
        "(EngineCore pid=9) INFO Starting torch.compile",
        "(EngineCore pid=9) INFO JIT kernel warmup starting.",
        "Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  12%|##",
        "(EngineCore pid=9) INFO Graph capturing finished in 9 secs, took 0.52 GiB",
    ):
        with log.open("a") as file:
            file.write(f"{line}\n")
        found.append(output.phase())
    assert found == ["inspecting the model"] * 2 + ["loading weights"] * 3 + [
        "compiling and warming up kernels", "compiling and warming up kernels", "capturing CUDA graphs",
        "compiling and warming up kernels",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["--logprobs-mode", "raw_logprobs"],
        ["--logprobs_mode=raw_logits"],
        ["--seed", "1", "--logprobs-mode=processed_logits"],
    ],
)
def test_no_argument_makes_log_probabilities_those_of_another_distribution(arguments: list[str]) -> None:
    with pytest.raises(ValidationError, match="--logprobs-mode"):
        InferenceConfig(model="m", extra_args=arguments)
    InferenceConfig(model="m", extra_args=["--logprobs-mode", "processed_logprobs", "--seed"])
    InferenceConfig.model_validate({"model": "m", "extra_args": []})
