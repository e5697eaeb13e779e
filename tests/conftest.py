"""What every test file shares: property tests are deterministic and have no time limit of their own on a busy machine; the
built-in models are built once, into the user's cache, by the first test that asks for one."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

import perf  # noqa: F401  (the processes that tests start find it, too)
from counterpoint.inference.config import LoraServingConfig
from tests.support.jobs import JOB, shipped_line, trained_line, write_lines
from tests.support.tiny_model import make_model, write_probe
from tests.support.vllm_server import PROBE_TOKENS, ServerProcess, run_server, tiny_config

settings.register_profile("counterpoint", deadline=None, derandomize=True, database=None)
settings.load_profile("counterpoint")


if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as below nohup: programs under test would ignore it, too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a script's background

# One thread of torch in each process: where so many processes share two cores, two threads spin while they wait for each other,
# and take ten times the CPU time of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.disable()  # until all tests are collected: their imports make millions of objects and no garbage
WRITES_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False  # until then, too: rewriting the tests' assertions takes as long as importing all else

SHARED_SERVERS = ("moe_server", "lora_server", "adapter_server")
"""Session fixtures that start a vLLM server."""


LONGEST = (
    "tests/whole_job/test_restarts.py",
    "tests/service/test_cookbook.py",
    "tests/examples/test_tutorial.py",
    "tests/examples/test_driven.py",
    "tests/perf/test_chaos.py",
    "tests/whole_job/test_several_ranks.py",
    "tests/tune/executors/test_on_ray.py",
    "tests/cluster/backends/test_on_ray.py",
    "tests/gpu/test_host_device.py",
    "tests/trainer/model/test_compiled.py",
    "tests/job/plan/test_at_start.py",
    "tests/trainer/test_sharding.py",
    "tests/trainer/test_experts.py",
    "tests/trainer/test_context.py",
    "tests/perf/test_guard_beside_others.py",
)
"""Files that take longest, in the order in which they begin: one that begins late keeps one process busy after all others.
Those that start a vLLM begin before those that start none."""

BENCHMARKS = "tests/perf/test_guard.py"
"""Decides nothing beside other tests, and then repeats what it has measured."""


TOO_LATE = "the time for all tests was over before it began"


class ByFile(LoadScopeScheduling):
    """How pytest-xdist divides the tests among processes (`pytest -n 4`, as `make test` and `make test-all` do).

    Those of a file run in one process, for its module's fixtures. So do all files that name the same server, and all that start
    a vLLM of their own, which needs gigabytes. The benchmarks run at last, in the process that is left when others have ended.
    """

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.partition("::")[0])

    def _reschedule(self, node: WorkerController) -> None:
        others = any(not other.shutting_down for other in self.nodes if other is not node)
        if list(self.workqueue) == [BENCHMARKS] and others and self._pending_of(self.assigned_work[node]) <= 2:
            node.shutdown()
        else:
            super()._reschedule(node)


@cache
def scope_of(file: str) -> str:
    """The scope of a file of tests, by its path in the repository."""
    text = (Path(__file__).parents[1] / file).read_text()
    return next((server for server in SHARED_SERVERS if server in text), "own servers" if "mark.vllm" in text else file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Called by pytest-xdist."""
    return ByFile(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the limit that a machine has which is much slower than usual; those that take longest have begun by then."""
    text = "skip tests that have not begun by then, and say how many (continuous integration has 90 minutes)"
    parser.addoption("--begin-before", type=float, default=float("inf"), metavar="UNIX_SECONDS", help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test for which no time is left."""
    if time.time() > item.config.getoption("--begin-before"):
        pytest.skip(TOO_LATE)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how many tests were not played."""
    late = [each for each in terminalreporter.stats.get("skipped", []) if TOO_LATE in str(each.longrepr)]
    if late:
        terminalreporter.write_line(f"{len(late)} tests were not played, from {late[0].nodeid} on: {TOO_LATE}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files whose tests take long first, so that no process is left with one at the end, then tests that kill a server that
    others use, and the benchmarks last."""
    with_vllm, slow = ({item.path for item in items if item.get_closest_marker(name)} for name in ("vllm", "slow"))
    items.sort(
        key=lambda item: (
            item.nodeid.startswith(BENCHMARKS),
            item.get_closest_marker("kills_server") is not None,
            item.path not in with_vllm,
            (*LONGEST, file := item.nodeid.partition("::")[0]).index(file),
            item.path not in slow,
        )
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Lets the garbage collector run again, without ever visiting what was imported; and writes bytecode only if it may."""
    sys.dont_write_bytecode = WRITES_NO_BYTECODE
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_moe() -> Path:
    """The directory of the warmed-up `tiny-moe`. Building it takes most of a minute: mark the test slow and give it time."""
    from counterpoint.models.build import make_model

    return make_model("tiny-moe")


@pytest.fixture(scope="session")
def tiny_dense() -> Path:
    """Likewise `tiny-dense`."""
    from counterpoint.models.build import make_model

    return make_model("tiny-dense")


@pytest.fixture(scope="session")
def moe_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A vLLM server of a mixture of experts that returns its routing and takes full weights. Its weights are those of the last
    test that loaded some."""
    root = tmp_path_factory.mktemp("moe")
    directories = [root / f"step_{version}" for version in range(2)]
    models = [make_model(directory, moe=True, seed=seed) for seed, directory in enumerate(directories)]
    for version, (model, directory) in enumerate(zip(models, directories, strict=True)):
        write_probe(model, directory, version, PROBE_TOKENS)
    # What a stock server needs to parse, too.
    config = tiny_config(
        directories[0], root, return_routed_experts=True, tool_parser="hermes", extra_args=["--enable-scale-out"]
    )
    yield from run_server(config, directories, models)


@pytest.fixture(scope="session")
def adapter_server(tmp_path_factory: pytest.TempPathFactory, tiny_dense: Path) -> Iterator[ServerProcess]:
    """A vLLM server of `tiny-dense` that takes LoRA adapters, for jobs of several runs."""
    lora = LoraServingConfig(max_rank=8, max_adapters=3)
    yield from run_server(tiny_config(tiny_dense, tmp_path_factory.mktemp("adapters"), lora=lora), [], [])


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("COUNTERPOINT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A valid job whose output goes to `tmp_path / "out"`."""
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(output_dir=tmp_path / "out"))
    return path


@pytest.fixture
def past(tmp_path: Path) -> Path:
    """The directory of a job that shipped 20 steps, two seconds apart, and trained 19."""
    output = tmp_path / "out"
    write_lines(output / "run_test" / "metrics.jsonl", [shipped_line(step, 100.0 + 2 * step) for step in range(1, 21)])
    write_lines(output / "trainer" / "metrics.jsonl", [trained_line(step) for step in range(1, 20)])
    write_lines(output / "trainer" / "metrics.jsonl", [trained_line(5, "another") | {"mismatch_kl": 9.0}])
    return output
