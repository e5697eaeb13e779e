"""Measures the service for the Tinker SDK: 512 and 2,000 samples at once, against a server that answers after 50 ms.

The service is a process of its own, as `counterpoint service` is; this process is its client, with the unmodified SDK, which
takes more of the machine than the service does. The lag is what the service says of its loop in `service/health.jsonl`.

    python -m perf.bench.samples [--quick | --full]
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tinker
import tomli_w

from counterpoint.job.evaluation.server import free_port
from counterpoint.job.resolve_model import resolve_model
from perf.bench.command import Size, show
from perf.bench.servers import load_server
from perf.chaos.disk import json_lines
from perf.commands import Command, until
from perf.figures import Case, Figure

DELAY_SECONDS = 0.05
PROMPT = list(range(1, 65))
SAMPLING = tinker.SamplingParams(max_tokens=16, temperature=1.0)

ROUNDS = 3

KEY = "tml-benchmark-of-samples"

BEAT_SECONDS = 0.1
"""The time between two heartbeats; the SDK sends one each 10 s."""


def measure(size: Size) -> list[Case]:
    """Measures each number of samples at once, in short the first alone, with a service of its own."""
    return [_measured(at_once) for at_once in size.pick([512], [512, 2000], [512, 2000])]


def _measured(at_once: int) -> Case:
    with tempfile.TemporaryDirectory() as directory, load_server(DELAY_SECONDS) as server:
        with _service(Path(directory), server) as url:
            sampler = _sampler(url)
            with _heartbeats(url) as beats:
                seconds = [_sample(sampler, at_once) for _ in range(ROUNDS)]
        lines = list(json_lines(Path(directory) / "service" / "health.jsonl"))
    return Case(f"samples ({at_once:,})", _figures(at_once, seconds, beats, lines))


@contextmanager
def _service(directory: Path, server: str) -> Iterator[str]:
    """Yields the URL of a service, which runs as long as the block."""
    port, file = free_port("127.0.0.1", 0), directory / "service.toml"
    model = str(resolve_model("tiny-dense"))
    values = {
        "output_dir": str(directory),
        "model": model,
        "name": "tiny",
        "port": port,
        "inference": {"urls": [server]},
    }
    file.write_text(tomli_w.dumps(values))
    with Command(log := directory / "service.log", "service", str(file)) as process:
        until("the service to start", lambda: "answers at" in log.read_text(), [process])
        yield f"http://127.0.0.1:{port}"


def _sampler(url: str) -> Any:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        client = tinker.ServiceClient(base_url=url, api_key=KEY)
        return client.create_sampling_client(base_model="tiny").result()


@contextmanager
def _heartbeats(url: str) -> Iterator[list[float]]:
    """Yields the seconds in which heartbeats of another session are answered, which go out during the block by a thread."""
    ended, found = threading.Event(), list[float]()

    def post(path: str, **body: object) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json", "X-API-Key": KEY}
        with urllib.request.urlopen(urllib.request.Request(f"{url}/api/v1/{path}", data, headers)) as response:
            return json.load(response)

    def beat() -> None:
        session = post("create_session", tags=[], sdk_version="0")["session_id"]
        while not ended.wait(BEAT_SECONDS):
            began = time.perf_counter()
            post("session_heartbeat", session_id=session)
            found.append(time.perf_counter() - began)

    thread = threading.Thread(target=beat, name="heartbeats")
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def _sample(sampler: Any, at_once: int) -> float:
    """Returns the seconds of so many samples at once."""
    began = time.perf_counter()
    prompt = tinker.ModelInput.from_ints(PROMPT)
    begun = [sampler.sample(prompt, num_samples=1, sampling_params=SAMPLING) for _ in range(at_once)]
    for each in begun:
        assert len(each.result().sequences) == 1
    return time.perf_counter() - began


def _figures(
    at_once: int, seconds: Sequence[float], beats: Sequence[float], lines: Sequence[dict[str, Any]]
) -> list[Figure]:
    p99s = sorted(1e3 * line["event_loop_lag/p99"] for line in lines)
    resident = [line["resident_bytes"] / 2**20 for line in lines]
    return [
        Figure("samples at once", at_once, ""),
        Figure("samples a second, with the client's own work", ROUNDS * at_once / sum(seconds), "1/s"),
        Figure("lag: p99 of the median interval of 10 s", p99s[len(p99s) // 2], "ms", 20.0, rounds=tuple(p99s)),
        Figure("heartbeat: the longest answer, with the client's own work", max(beats), "s", 10.0),
        Figure("lag: max", max(1e3 * line["event_loop_lag/max"] for line in lines), "ms"),
        Figure("resident size, at most", max(resident), "MiB", timed=False),
        Figure(
            "growth of resident size by all samples, over that of a start",
            max(resident) / resident[0],
            "x",
            1.5,
            timed=False,
        ),
    ]


if __name__ == "__main__":
    show(measure)
