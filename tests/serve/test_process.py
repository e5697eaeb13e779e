"""`counterpoint serve` as a process: it listens where it says, yields the CPU, and its deaths harm no job."""

from __future__ import annotations

import http.server
import os
import pty
import re
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from counterpoint.job.directory import read_json
from counterpoint.job.processes_file import read_workers
from counterpoint.job.serving.config import ServeConfig
from counterpoint.models import write_tokenizer
from counterpoint.serve.main import Certificate, serve
from counterpoint.transport.errors import UserError
from tests.support.jobs import JOB
from tests.support.polling import DEADLINE_SECONDS, wait_until
from tests.support.ports import free_port

pytestmark = pytest.mark.slow

SERVE = [sys.executable, "-m", "counterpoint.cli.main", "serve"]
KILLS = 10


@contextmanager
def served(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    command = [*SERVE, *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        found = re.search(r"https?://\S+", process.stdout.readline())
        assert found is not None, process.communicate()
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def status_of(url: str, token: str = "", context: ssl.SSLContext | None = None) -> int:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS, context=context) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def nice_of(thread: Path) -> int:
    return int((thread / "stat").read_text().rpartition(")")[2].split()[16])


def test_it_serves_yields_the_cpu_and_ends_on_request(tmp_path: Path) -> None:
    (tmp_path / "run_a").mkdir()
    with served(tmp_path) as (process, url):
        assert status_of(url) == 200
        read = (tmp_path / "serve" / "read.token").read_text().strip()
        assert (status_of(f"{url}api/v1/jobs"), status_of(f"{url}api/v1/jobs", read)) == (401, 200)
        assert nice_of(Path(f"/proc/{process.pid}/task/{process.pid}")) == 19
        process.terminate()
        output, errors = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 0
        assert read not in output + errors
    assert not (tmp_path / "serve" / "audit.jsonl").exists()


def test_a_terminal_gets_links_that_open_the_page(tmp_path: Path) -> None:
    (tmp_path / "run_a").mkdir()
    terminal, end = pty.openpty()
    process = subprocess.Popen([*SERVE, tmp_path, "--port", "0"], stdout=end, stderr=subprocess.PIPE)
    try:
        os.close(end)
        shown = b""
        while b"to change: " not in shown or not shown.endswith(b"\n"):
            shown += os.read(terminal, 4096)
        for name, file in (("look:  ", "read.token"), ("change:", "admin.token")):
            found = re.search(rf"to {name} (https?://\S+)#token=(\S+)", shown.decode())
            assert found is not None
            assert found[2] == (tmp_path / "serve" / file).read_text().strip()
            assert status_of(f"{found[1]}api/v1/jobs", found[2]) == 200
    finally:
        process.kill()
        process.communicate()
        os.close(terminal)


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """Makes a certificate for 127.0.0.1 that vouches for itself, and its key."""
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return certificate, key


def test_a_name_beyond_loopback_needs_tls_and_gets_it(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    with pytest.raises(ValueError, match="can be reached from other machines"):
        ServeConfig(host="0.0.0.0")
    ServeConfig(host="0.0.0.0", tls_certificate=certificate, tls_key=key)
    with served(tmp_path, "--tls-certificate", certificate, "--tls-key", key) as (_, url):
        assert url.startswith("https://127.0.0.1:")
        assert status_of(url, context=ssl.create_default_context(cafile=certificate)) == 200
        with pytest.raises(urllib.error.URLError):
            status_of(url)  # the machine's authorities do not know it
        with pytest.raises(OSError):  # noqa: PT011 - reset, or an empty answer
            status_of(url.replace("https", "http"))


def test_a_certificate_is_replaced_while_it_serves(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    (tmp_path / "new").mkdir()
    new, its_key = make_certificate(tmp_path / "new")
    expects_new = ssl.create_default_context(cafile=new)
    with served(tmp_path, "--tls-certificate", certificate, "--tls-key", key) as (_, url):
        with pytest.raises(urllib.error.URLError):
            status_of(url, context=expects_new)
        for source, target in ((its_key, key), (new, certificate)):
            source.replace(target)
        wait_until(lambda: is_answered(url, expects_new), "the new certificate")


def test_files_that_are_replaced_while_they_are_read_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / name for name in ("served", "new", "newer")]
    for path in paths:
        path.mkdir()
    (certificate, key), (new, its_key), (newer, _) = map(make_certificate, paths)
    given = Certificate(certificate, key)
    with in_background(given.context) as url:
        expects = {name: ssl.create_default_context(cafile=file) for name, file in (("old", certificate), ("new", new))}
        load = ssl.SSLContext.load_cert_chain

        def load_and_replace(context: ssl.SSLContext, certfile: Path, keyfile: Path) -> None:
            load(context, certfile, keyfile)
            certificate.write_bytes(newer.read_bytes())  # its key is still to come

        monkeypatch.setattr("counterpoint.transport.files.watched.LOOK_SECONDS", 0.0)
        with monkeypatch.context() as within:
            within.setattr(ssl.SSLContext, "load_cert_chain", load_and_replace)
            given.refresh()
        assert is_answered(url, expects["old"])
        certificate.write_bytes(new.read_bytes())
        key.write_bytes(its_key.read_bytes())
        given.refresh()
        assert is_answered(url, expects["new"])
        assert not is_answered(url, expects["old"])


@contextmanager
def in_background(context: ssl.SSLContext) -> Iterator[str]:
    """Serves, for each connection of its own, by a thread."""
    with http.server.HTTPServer(("127.0.0.1", 0), Empty) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class Empty(http.server.BaseHTTPRequestHandler):
    """Answers with nothing."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def is_answered(url: str, context: ssl.SSLContext) -> bool:
    try:
        return status_of(url, context=context) == 200
    except urllib.error.URLError:
        return False


def test_a_wrong_start_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--state-directory"):
        serve([tmp_path / "missing"], ServeConfig(), print, lambda: None)
    with pytest.raises(UserError, match="so that no job could begin there"):
        serve([tmp_path], ServeConfig(), print, lambda: None)
    (tmp_path / "run_a").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [*SERVE, str(tmp_path), "--port", str(port)]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert (completed.returncode, f"cannot listen on 127.0.0.1, port {port}" in completed.stderr) == (75, True)


def pid_of_server(output: Path) -> int | None:
    """The living server's process, as the job says."""
    try:
        workers = {worker["name"]: worker for worker in read_workers(output)}
    except OSError:
        return None
    pid = workers["serve"]["pid"] if "serve" in workers else None
    return pid if pid is not None and Path(f"/proc/{pid}").exists() else None


def command_of_a_job(tmp_path: Path) -> list[str]:
    """The command of a job in `out` with a page, whose run only pretends."""
    file, model = tmp_path / "job.toml", tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    write_tokenizer(model, longest=1024)
    file.write_text("serve = { port = 0 }\n" + JOB.format(output_dir=tmp_path / "out"))
    command = [sys.executable, "-m", "tests.serve.served_job", str(file), "--model", str(model)]
    return [*command, "--inference.port", str(free_port())]


def test_a_job_prints_links_with_the_tokens_on_a_terminal_and_in_no_log(tmp_path: Path) -> None:
    output, terminal = tmp_path / "out", os.openpty()
    printed = b""
    job = subprocess.Popen(command_of_a_job(tmp_path), stdin=subprocess.DEVNULL, stdout=terminal[1], stderr=terminal[1])
    os.close(terminal[1])

    def read_links() -> bool:
        nonlocal printed
        while select.select([terminal[0]], [], [], 0.0)[0]:
            printed += os.read(terminal[0], 2**16)
        return printed.count(b"#token=") >= 2

    try:
        wait_until(read_links, "both links", DEADLINE_SECONDS, lambda: printed.decode(errors="replace"))
        tokens = [(output / "serve" / f"{name}.token").read_bytes().strip() for name in ("read", "admin")]
        assert all(token in printed.replace(b"\r\n", b"") for token in tokens)
        logs = [file.read_bytes() for file in output.rglob("*.log")]
        assert logs
        assert not any(token in log for token in tokens for log in logs)
    finally:
        job.kill()
        job.wait()
        os.close(terminal[0])


def test_a_server_that_is_killed_ten_times_does_nothing_to_its_job(tmp_path: Path) -> None:
    output, command = tmp_path / "out", command_of_a_job(tmp_path)
    log = tmp_path / "log.txt"
    with log.open("w") as lines:
        job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=lines, stderr=lines)

    def shown() -> str:
        served_log = output / "serve.log"
        return log.read_text() + (served_log.read_text() if served_log.exists() else "")

    try:
        killed: set[int] = set()
        for number in range(KILLS):
            wait_until(
                lambda: (pid_of_server(output) or 0) not in {0, *killed}, "a new server", DEADLINE_SECONDS, shown
            )
            if number == 0:  # one that answers; the others at any moment of their start
                wait_until(
                    lambda: "serving at" in (output / "serve.log").read_text(), "its readiness", DEADLINE_SECONDS, shown
                )
            pid = pid_of_server(output)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        assert job.poll() is None, shown()
        workers = {worker["name"]: worker for worker in read_workers(output)}
        assert (workers["orchestrator"]["restarts"], workers["orchestrator"]["last_death"]) == (0, "")
        (output / "run_test" / "control" / "go").touch()
        assert job.wait(DEADLINE_SECONDS) == 0, shown()
    finally:
        job.kill()
        job.wait()
    assert len((output / "run_test" / "metrics.jsonl").read_text().splitlines()) == 20
    assert read_json(output / "processes.json")["job"] == "stopped"
    assert (output / "serve" / "admin.token").read_text().strip() not in shown()
