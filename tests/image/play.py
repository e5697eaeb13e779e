"""Plays a run with the orchestrator's image: the trainer and a vLLM outside, the orchestrator killed, stopped and started.

Usage, as root: `python -m tests.image.play IMAGE ENGINE...`, with an engine such as `podman`. The container has a read-only root
and no capabilities. Every step has to be shipped and trained exactly once, and no process may be left unreaped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from counterpoint.models.build import make_model
from tests.support.polling import wait_until
from tests.support.ports import free_port

USER = 10001
"""The image's user."""

STEPS = 100

SECONDS = 300.0
"""How long any one thing may take, on a busy machine."""

RUN = """
run_id = "image"
output_dir = "/data"
model = "/models/tiny"
served_model = "{models}/tiny"
steps = {steps}

[[environments]]
name = "reverse-text"
kind = "reverse-text"

[sampling]
max_tokens = 16

[schedule]
group_size = 4
rollouts_per_step = 16
max_inflight_rollouts = 32

[inference]
urls = ["http://127.0.0.1:{server}"]
api_key_file = "keys/token"
send_weights = true

[transport]
address = "tcp://127.0.0.1:{wire}"
server_public_key_file = "keys/trainer.key"
secret_key_file = "keys/orchestrator.key_secret"
"""

TRAINER = """
output_dir = "{data}"
model = "{models}/tiny"
dtype = "float32"
max_tokens = 2048

[transport]
address = "tcp://127.0.0.1:{wire}"
server_public_key_file = "keys/trainer.key"
secret_key_file = "keys/trainer.key_secret"
authorized_keys_directory = "keys/authorized"
"""

SERVER = """
model = "{models}/tiny"
port = {server}
dtype = "float32"
max_model_len = 128
api_key_file = "keys/token"
"""


class Player:
    """One run with its directories, `etc`, `data` and `models`, below `root`."""

    def __init__(self, image: str, engine: Sequence[str], root: Path) -> None:
        self._engine, self._image, self._root = engine, image, root
        self._name = f"counterpoint-image-test-{os.getpid()}"
        self._run_dir = root / "data" / "run_image"
        ports = {"wire": free_port(), "server": free_port()}
        for name in ("etc", "data", "models"):
            (root / name).mkdir(mode=0o755)
        for name in ("etc", "data"):
            os.chown(root / name, USER, USER)
        paths = {"models": root / "models", "data": root / "data"}
        for name, text in (("run", RUN), ("trainer", TRAINER), ("inference", SERVER)):
            (root / "etc" / f"{name}.toml").write_text(text.format(steps=STEPS, **ports, **paths))

    def play(self) -> None:
        """Plays everything; raises `AssertionError` or `subprocess.CalledProcessError` for what does not hold."""
        shutil.copytree(make_model("tiny-dense"), self._root / "models" / "tiny")
        for path in (self._root / "models").rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        self._make_keys()
        with ExitStack() as stack:
            stack.callback(self._command, "rm", "--force", self._name, check=False)
            for role in ("inference", "trainer"):
                stack.enter_context(self._role(role))
            self._refuse_weights_that_the_server_does_not_see()
            self._begin()
            self._wait_for_step(3)
            self._check_health()
            self._command("kill", "--signal", "KILL", self._name)
            self._again(137)
            self._wait_for_step(self._newest_step() + 3)
            self._command("stop", "--time", str(int(SECONDS)), self._name)
            self._again(143)
            assert self._code_at_the_end() == 0
            self._check_steps()

    def _make_keys(self) -> None:
        command = ["run", "--rm", *self._limits(), "--volume", f"{self._root}/etc:/etc/counterpoint", self._image]
        for _ in range(2):  # what is there stays
            self._command(*command, "keys", "/etc/counterpoint/keys")
        said(f"keys: {sorted(path.name for path in (self._root / 'etc' / 'keys').iterdir())}")

    def _refuse_weights_that_the_server_does_not_see(self) -> None:
        """The server has the job's directory under another path; nothing but `send_weights` mends that, so the exit code is 2."""
        command = ["run", "--rm", *self._limits(), *self._mounts(), self._image]
        words = ["orchestrator", "/etc/counterpoint/run.toml", "--resume", "--inference.send_weights", "false"]
        ended = self._command(*command, *words, check=False)
        assert ended.returncode == 2, ended.stdout + ended.stderr
        assert "does not see /data/run_image/broadcast" in ended.stdout + ended.stderr, ended.stdout + ended.stderr
        said("a server that does not see the weights says so, and the orchestrator ends with 2")

    def _begin(self) -> None:
        self._command("run", "--detach", "--name", self._name, *self._limits(), *self._mounts(), self._image)

    def _again(self, code: int) -> None:
        """Waits for the container's end, which has to be by `code`, and starts it again."""
        assert (found := self._code_at_the_end()) == code, f"it ended with {found}; expected {code}"
        said(f"ended with {code} after step {self._newest_step()}; started again")
        self._command("start", self._name)

    def _check_health(self) -> None:
        """The health check passes, and nothing that is run beside the command is left as a zombie."""
        for _ in range(3):
            self._command("exec", self._name, "counterpoint", "status", "/data", "--health")
            self._command("exec", self._name, "sh", "-c", "(sleep 0.1 &)")
        first = int(self._inspect("{{.State.Pid}}"))
        wait_until(lambda: len(children(first)) == 1, "PID 1 to have one child", SECONDS, lambda: str(children(first)))
        said("the health check passes, and PID 1 has reaped every orphan")

    def _check_steps(self) -> None:
        expected = list(range(1, STEPS + 1))
        for file in (self._run_dir / "metrics.jsonl", self._root / "data" / "trainer" / "metrics.jsonl"):
            steps = [json.loads(line)["step"] for line in file.read_text().splitlines()]
            assert steps == expected, f"{file}: steps {steps}"
        said(f"each of {STEPS} steps was shipped and trained exactly once")

    def _wait_for_step(self, step: int) -> None:
        def tells() -> str:
            return self._command("logs", "--tail", "20", self._name, check=False).stderr

        wait_until(lambda: self._newest_step() >= step, f"step {step}", SECONDS, tells)

    def _newest_step(self) -> int:
        try:
            lines = (self._run_dir / "metrics.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return 0
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def _code_at_the_end(self) -> int:
        return int(self._command("wait", self._name).stdout)

    def _inspect(self, template: str) -> str:
        return self._command("inspect", "--format", template, self._name).stdout.strip()

    def _limits(self) -> Sequence[str]:
        return (
            "--network", "host", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL",
            "--ulimit", "nofile=20000:20000", "--ulimit", "nproc=20000:20000",
        )  # fmt: skip

    def _mounts(self) -> Sequence[str]:
        volumes = (
            f"{self._root}/data:/data",
            f"{self._root}/models:/models:ro",
            f"{self._root}/etc:/etc/counterpoint:ro",
        )
        return [word for volume in volumes for word in ("--volume", volume)]

    def _command(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            [*self._engine, *words], capture_output=True, text=True, timeout=2 * SECONDS, check=False
        )
        if check and ended.returncode:
            said(f"{' '.join([*self._engine, *words])}\n{ended.stdout}{ended.stderr}")
            ended.check_returncode()
        return ended

    @contextmanager
    def _role(self, name: str) -> Iterator[None]:
        """Runs a role outside, with the umask that lets the container read what it writes; its log is shown if the play fails."""
        log = self._root / f"{name}.log"
        command = [sys.executable, "-m", "counterpoint.cli.main", name, str(self._root / "etc" / f"{name}.toml")]
        with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output, umask=0o022) as process:
            try:
                yield
            except BaseException:
                said(f"the end of {log}:\n" + "\n".join(log.read_text().splitlines()[-30:]))
                raise
            finally:
                process.terminate()
                process.wait(SECONDS)


def children(pid: int) -> list[str]:
    """Returns the children of a process."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def said(line: str) -> None:
    """Prints what holds."""
    print(f"image-test: {line}", flush=True)


def main(image: str, *engine: str) -> None:
    """Plays in a temporary directory that the image's user can reach."""
    with tempfile.TemporaryDirectory(prefix="image-test-", dir="/var/tmp") as root:
        Path(root).chmod(0o755)
        Player(image, engine, Path(root)).play()


if __name__ == "__main__":
    main(*sys.argv[1:])
