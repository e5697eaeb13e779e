"""The entry point as a process: how quick it is, what it imports, how it refuses."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from functools import partial
from itertools import chain
from pathlib import Path

import pytest

from counterpoint.cli.main import COMMANDS, main
from tests.support.polling import DEADLINE_SECONDS
from tests.support.ports import free_port, taken_port


def counterpoint(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "counterpoint.cli.main", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | variables, check=False, stdin=subprocess.DEVNULL
    )  # fmt: skip


def refused(*arguments: str, code: int = 2) -> str:
    """What a command that ends with such an exit code says, which is no traceback."""
    completed = counterpoint(*arguments)
    assert completed.returncode == code, completed.stderr
    assert "Traceback" not in completed.stderr
    return completed.stderr


def refused_here(capfd: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """The same of a command that runs in this process, as it does not import anything anew."""
    try:
        ended: object = main([*arguments])
    except SystemExit as exit:  # a process that the command started has said why
        ended = exit.code
    assert ended == code
    said = capfd.readouterr().err
    assert "Traceback" not in said
    return said


def processor_seconds(command: list[str]) -> float:
    """The fewest of several runs. Other work on the machine takes none of them from a process, and delays it only."""
    used = []
    for _ in range(7):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        used.append(usage.ru_utime + usage.ru_stime)
    return min(used)


def test_the_first_process_of_a_container_ends_by_sigterm_before_its_command_handles_it() -> None:
    program = """
import os, signal
os.getpid = lambda: 1
import counterpoint.cli.main
counterpoint.cli.main._module = lambda name: signal.raise_signal(signal.SIGTERM)
counterpoint.cli.main.main(["orchestrator", "run.toml"])
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_help_costs_little_more_than_python_itself() -> None:
    bare = processor_seconds([sys.executable, "-c", "pass"])
    helped = processor_seconds([sys.executable, "-m", "counterpoint.cli.main", "--help"])
    assert helped < 3 * bare


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, counterpoint.cli.main; counterpoint.cli.main.main(['--help']); print(*sys.modules, file=sys.stderr)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(completed.stderr.split())
    assert not loaded & {"pydantic", "numpy", "rich", "asyncio", "aiohttp", "torch", "vllm", "argparse"}
    for command in COMMANDS:
        assert command in completed.stdout


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "orchestrator", "trainer", "inference"])
def test_the_help_of_a_command_lists_its_keys_without_torch(command: str) -> None:
    call = f"import sys; from counterpoint.cli.main import main; main(['{command}', '--help', 'all'])"
    code = f"{call}; print(*sys.modules, file=sys.stderr)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"usage: counterpoint {command} FILE" in completed.stdout
    assert "--model" in completed.stdout
    assert not set(completed.stderr.split()) & {"torch", "vllm", "transformers", "pydantic_settings"}


@pytest.mark.slow
def test_the_help_shows_what_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    """A flag for each key; N for the position in a list, whose tables may be of several kinds."""
    assert main(["orchestrator", "--help", "all"]) == 0
    shown = capsys.readouterr().out
    assert "--training.betas  (list of number)" in shown
    assert "  --filters.N.kind  (gibberish | repetition | zero_advantage)" in shown
    assert "  --environments.N.ratio  (number = 1.0)" in shown
    assert "--filters  (list of tables, as JSON)" in shown
    assert "[]" not in shown


def test_an_unknown_command_is_refused() -> None:
    assert "did you mean trainer?" in refused("trainr")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "lacks"),
    [
        ("trainer {dir}/trainer.toml", "torch"),
        ("sft {dir}/sft.toml", "torch"),
        ("plan {job} --gpus 1xH100-80", "torch"),
        ("run {job} --output_dir {dir}/out", "torch, vllm"),
        ("inference {dir}/inference.toml", "vllm"),
        ("eval {job}", "vllm"),
        ("env check reverse-text", "vllm"),
        ("make-model tiny-dense", "torch"),
    ],
)
def test_a_command_without_its_extra_says_at_once_what_to_install(
    command: str,
    lacks: str,
    job_file: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in the container, which holds the orchestrator's dependencies only."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "vllm", None)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "trainer.toml").write_text(f'output_dir = "{tmp_path}/out"\nmodel = "{tmp_path}"')
    (tmp_path / "inference.toml").write_text(f'model = "{tmp_path}"')
    (tmp_path / "sft.toml").write_text(
        f'output_dir = "{tmp_path}/out"\nmodel = "{tmp_path}"\n[data]\npath = "{job_file}"'
    )
    said = refused_here(capfd, *command.format(dir=tmp_path, job=job_file).split())
    assert f" needs {lacks}, which " in said
    assert "'counterpoint[cpu]' or 'counterpoint[gpu]'" in said
    assert not (tmp_path / "out").exists()


def test_an_import_that_fails_for_want_of_an_extra_names_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", None)

    def fail(name: str) -> None:
        importlib.import_module("vllm.sampling_params")

    monkeypatch.setattr("counterpoint.cli.main._module", fail)
    assert "needs vllm, which is not installed" in refused_here(capfd, "serve")
    monkeypatch.setattr("counterpoint.cli.main._module", lambda name: importlib.import_module("no_such_module"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main(["serve"])


@pytest.mark.slow
def test_dry_run_prints_the_resolved_configuration_and_touches_nothing(job_file: Path, tmp_path: Path) -> None:
    completed = counterpoint("run", str(job_file), "--dry-run", "--seed", "3", COUNTERPOINT_ORCHESTRATOR__STEPS="7")
    assert completed.returncode == 0
    assert "steps = 7" in completed.stdout
    assert "seed = 3" in completed.stdout
    assert list(tmp_path.iterdir()) == [job_file]


@pytest.mark.slow
def test_bad_input_is_refused_before_anything_is_written(
    job_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of the ways to be wrong that a command line can see."""
    file, refused = str(job_file), partial(refused_here, capfd)
    assert "no key trainer.treads" in refused("run", file, "--trainer.treads", "3")
    assert "valid integer" in refused("run", file, "--trainer.threads", "x")
    without_file = refused("run")
    assert "which file" in without_file
    assert len(without_file.splitlines()) <= 3
    kind = '[{"name": "a", "kind": "reverse-txt"}]'
    for dry_run in ([], ["--dry-run"]):
        message = refused("run", file, "--orchestrator.environments", kind, *dry_run)
        assert "did you mean 'reverse-text'? Built in are" in message
        assert "exclude each other" in refused("run", file, "--resume", "--fresh", *dry_run)
        assert "nearest: group_mean" in refused("run", file, "--orchestrator.advantage.kind", "group_maen", *dry_run)
        assert "model = './modle': there is no such directory" in refused("run", file, "--model", "./modle", *dry_run)
    assert "not a directory that may be written to" in refused("run", file, "--output_dir", f"{job_file}/below")
    with taken_port() as port:
        assert f"inference.port = {port}: cannot listen" in refused("run", file, "--inference.port", str(port), code=75)
    assert list(tmp_path.iterdir()) == [job_file]


MY_TASKS = """
from counterpoint.environments.tasks.guess_number import GuessNumber as Sums
from counterpoint.orchestrator.step.advantages import group_mean as advantage


def loss(inputs):
    from counterpoint.trainer.losses.contract import LossOutputs

    loss_P = -inputs.advantages_P * inputs.trainer_log_probabilities_P
    return LossOutputs(loss_P, loss_P.isnan())
"""


NAMED_BY_IMPORT_PATH = [
    ("--orchestrator.environments", '[{"name": "mine", "kind": "my_tasks:Sums"}]'),
    ("--orchestrator.advantage.kind", "my_tasks:advantage"),
    ("--orchestrator.training.loss.kind", "my_tasks:loss"),
]


@pytest.mark.slow
@pytest.mark.parametrize("flag", NAMED_BY_IMPORT_PATH)
def test_whatever_is_named_by_an_import_path_is_loaded_before_anything_is_written(
    flag: tuple[str, str],
    job_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    said = refused_here(capfd, "run", str(job_file), *flag, "--dry-run")
    assert "put the directory of my_tasks on PYTHONPATH" in said
    assert list(tmp_path.iterdir()) == [job_file]


@pytest.mark.slow
def test_what_cannot_be_imported_is_refused_before_anything_is_written(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is loaded by a process of its own: whatever it does there is not done to ours."""
    flags = (str(job_file), *NAMED_BY_IMPORT_PATH[0])
    modules = tmp_path / "modules"
    modules.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(modules))
    for text, said in (("import no_such_thing", "No module named 'no_such_thing'"), ("1 / 0", "ZeroDivisionError")):
        (modules / "my_tasks.py").write_text(text)
        message = refused_here(capfd, "run", *flags)
        assert said in message
        assert "PYTHONPATH" not in message
    (modules / "my_tasks.py").write_text("import os; os.kill(os.getpid(), 11)")
    assert "was killed by SIGSEGV" in refused_here(capfd, "run", *flags, "--dry-run")
    (modules / "my_tasks.py").write_text(MY_TASKS)
    assert main(["run", str(job_file), *chain.from_iterable(NAMED_BY_IMPORT_PATH), "--dry-run"]) == 0
    shown = capfd.readouterr().out
    for name in ("my_tasks:Sums", "my_tasks:advantage", "my_tasks:loss"):
        assert name in shown
    assert "my_tasks" not in sys.modules
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.toml", "modules"]


@pytest.mark.slow
def test_a_missing_model_is_refused_before_anything_is_written(
    job_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    port = str(free_port())
    message = refused_here(capfd, "run", str(job_file), "--model", str(tmp_path / "no-model"), "--inference.port", port)
    assert "no-model" in message
    assert list(tmp_path.iterdir()) == [job_file]


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COUNTERPOINT_CACHE", "/proc/nowhere")
    said = refused_here(capfd, "make-model", "tiny-moe")
    assert "COUNTERPOINT_CACHE = '/proc/nowhere' cannot hold models" in said


INTERRUPTIBLE = """
import signal, sys
from counterpoint.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_ctrl_c_while_the_model_is_built_says_that_nothing_was_lost(job_file: Path, tmp_path: Path) -> None:
    port = str(free_port())
    command = [sys.executable, "-c", INTERRUPTIBLE, "run", str(job_file), "--inference.port", port]
    environment = os.environ | {"COUNTERPOINT_CACHE": str(tmp_path / "cache")}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as run:
        assert run.stderr is not None
        assert any("building it at" in line for line in run.stderr)
        run.send_signal(signal.SIGINT)
        said = run.stderr.read()
        assert run.wait(DEADLINE_SECONDS) == 130
    assert "interrupted while the model tiny-moe was found or built" in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


STUBBORN = """
import os
import signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:  # as a callback of an import, or a library that wraps whatever is raised
    pass
def main(rest):
    return 0 if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_IGN) else 3
"""


@pytest.mark.parametrize(("handler", "code"), [(signal.SIG_DFL, -signal.SIGINT), (signal.SIG_IGN, 0)])
def test_ctrl_c_while_a_command_is_imported_ends_it(handler: signal.Handlers, code: int, tmp_path: Path) -> None:
    """A shell's background commands ignore it, and go on doing so."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    program = "from counterpoint.cli import main; main.COMMANDS['run'] = ('stubborn', ''); sys.exit(main.main(['run']))"
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {program}"],
        capture_output=True, timeout=DEADLINE_SECONDS, check=False, preexec_fn=partial(signal.signal, signal.SIGINT, handler),
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (code, b"")


def test_an_error_cannot_steer_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    assert refused_here(capfd, "run", "\x1b[2J.toml") == "counterpoint: error: \\x1b[2J.toml: there is no such file\n"
