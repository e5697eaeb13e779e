"""Four keys ask a service for all they may while a fifth trains: what they ask for, and what the fifth sees of it.

`python -m perf.chaos tinker --beside MINUTES` plays it. The fifth trains the same rounds again and again, and takes small samples
in each; before, it does so alone. Each of the four has a kind of load of its own (`LOADS`), in one process beside.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import tinker

from counterpoint.job.processes_file import read_workers
from counterpoint.service.tinker.intake import zstd
from counterpoint.service.tinker.proto import INT32, MESSAGES
from counterpoint.transport.process.child import Child
from counterpoint.transport.process.launch import descendants
from perf.chaos.disk import json_lines
from perf.chaos.report import say
from perf.figures import Figure
from perf.noise import cpu_seconds

KEYS = {name: f"tml-{name * 20}" for name in ("trains", "samples", "bodies", "models", "connects")}
"""The keys by what they do; the first is whom the others may not disturb."""

MODEL = "tiny-dense"

ROUNDS = 12
"""Those that are trained alone, and then again and again."""

FLOOD = {"num_samples": 1024, "sampling_params": {"max_tokens": 128, "stop": []}}
FLOODS = 40
"""Requests for so many samples at once."""

TIMES = 10.0
"""How many times its time alone the slowest small sample of a hundred may take."""

MOST_RESIDENT = 1024.0
"""The MiB that the service may have at any look. Bodies come and go: what stays is compared by the least sizes."""

WARM_MINUTES = 5
"""The length from which on the second quarter is no longer the time in which the service fills."""

REST_SECONDS = 0.2
"""The pause of a key after a refusal."""

PAUSED = (402, 403, 413, 422, 429, 503)
"""The statuses of refusals that are no fault."""


class Tenant:
    """One key's requests by HTTP, without the SDK."""

    def __init__(self, url: str, key: str, http: aiohttp.ClientSession, seen: Counter[str]) -> None:
        """Counts the statuses of answers in `seen`."""
        self._url, self._key, self._http, self._seen = url, key, http, seen
        self.session = ""

    async def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Returns the status and the answer to a POST; 0 without one. `body` is JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else orjson.dumps(body or {})
        given = {"X-API-Key": self._key, "Content-Type": "application/json"} | headers
        try:
            async with self._http.post(f"{self._url}{path}", data=data, headers=given) as response:
                self._seen[str(response.status)] += 1
                answer = await response.read()
                return response.status, orjson.loads(answer) if response.content_type == "application/json" else answer
        except (aiohttp.ClientError, TimeoutError):
            self._seen["none"] += 1
            return 0, None
        finally:
            await asyncio.sleep(0)

    async def begin(self) -> None:
        """Begins a session, and goes on once there is one."""
        while not self.session:
            status, answer = await self.ask("/api/v1/create_session", {"tags": [], "sdk_version": "0"})
            self.session = answer["session_id"] if status == 200 else ""
            await asyncio.sleep(0 if self.session else REST_SECONDS)

    async def result(self, request_id: str) -> tuple[int, Any]:
        """Waits for a result."""
        while True:
            status, answer = await self.ask("/api/v1/retrieve_future", {"request_id": request_id})
            if not (status == 200 and isinstance(answer, dict) and answer.get("type") == "try_again"):
                return status, answer


async def sample(tenant: Tenant) -> None:
    """Asks for 40 times 1,024 samples at once, and cancels each after three seconds or fetches it."""
    await tenant.begin()
    made = {"session_id": tenant.session, "sampling_session_seq_id": 0, "base_model": MODEL}
    _, answer = await tenant.ask("/api/v1/create_sampling_session", made)
    numbers = iter(range(2**31))

    async def flood(cancels: bool) -> None:
        body = FLOOD | {"sampling_session_id": answer["sampling_session_id"], "seq_id": next(numbers)}
        status, asked = await tenant.ask("/api/v1/asample", body | {"prompt": {"chunks": [{"tokens": [5, 6, 7]}]}})
        if status != 200:
            await asyncio.sleep(REST_SECONDS)
        elif cancels:
            await asyncio.sleep(3)
            await tenant.ask("/api/v1/cancel_future", {"request_id": asked["request_id"]})
        else:
            await tenant.result(asked["request_id"])

    await asyncio.gather(*(for_ever(partial(flood, number % 2 == 0)) for number in range(FLOODS)))


async def send_bodies(tenant: Tenant) -> None:
    """Sends bodies that unpack to 64 MB, nested JSON of 8 MB, sessions with 1 MB of notes, and lists these."""
    await tenant.begin()
    packed = zstd.compress(bytes(60 * 2**20))
    nested = b'{"tags": [], "sdk_version": "0", "user_metadata": {"a": [' + b"[[]]," * 1_600_000 + b"0]}}"
    noted = {"tags": [], "sdk_version": "0", "user_metadata": {"a": "x" * 1_000_000}}

    async def packs() -> None:
        headers = {"Content-Encoding": "zstd", "Content-Type": "application/x-protobuf"}
        await rested(tenant.ask("/api/v1/forward_backward", packed, **headers))

    async def lists() -> None:
        await rested(tenant.ask("/api/v1/create_session", noted))
        await rested(tenant.ask("/api/v1/sessions/search", {"limit": 50}))

    works: list[Callable[[], Awaitable[None]]] = [
        *[packs] * 3,
        *[lists] * 2,
        lambda: rested(tenant.ask("/api/v1/create_session", nested)),
        lambda: rested(tenant.ask("/api/v1/optim_step", b'{"model_id": "x", "seq_id": 1' + b"0" * 30 + b"}")),
    ]
    await asyncio.gather(*map(for_ever, works))


async def train_models(tenant: Tenant) -> None:
    """Trains two models by contributions of many long data without a pause, and saves them."""
    await tenant.begin()
    chance = random.Random(1)

    async def model(number: int) -> None:
        lora = {"rank": 4, "train_unembed": False}
        made = {"session_id": tenant.session, "model_seq_id": number, "base_model": MODEL, "lora_config": lora}
        _, promised = await tenant.ask("/api/v1/create_model", made)
        await tenant.result(promised["request_id"])
        model_id = promised["request_id"].rpartition(":")[0]
        for seq_id in range(1, 2**31):
            body, headers = contribution(model_id, seq_id, chance), {"Content-Type": "application/x-protobuf"}
            asked: tuple[str, Any, dict[str, str]] = ("forward_backward", body, headers)
            if seq_id % 4 == 0:
                saves, mine = seq_id % 16 == 0, {"model_id": model_id, "seq_id": seq_id}
                rest = {"path": "same", "overwrite": True} if saves else {"adam_params": {"learning_rate": 1e-4}}
                asked = ("save_weights" if saves else "optim_step", mine | rest, {})
            while (status := (await tenant.ask(f"/api/v1/{asked[0]}", asked[1], **asked[2]))[0]) != 200:
                if status not in (0, *PAUSED):
                    raise RuntimeError(f"{asked[0]} is answered {status}")
                await asyncio.sleep(REST_SECONDS)
            if seq_id % 8 == 0:
                await tenant.result(f"{model_id}:{seq_id}")

    await asyncio.gather(model(0), model(1))


def contribution(model_id: str, seq_id: int, chance: random.Random) -> bytes:
    """Returns a `ForwardBackwardRequest` of 32 data of 200 tokens."""
    message = MESSAGES["ForwardBackwardRequest"](model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    for _ in range(32):
        datum, tokens = message.data.add(), b"".join(chance.randrange(5, 90).to_bytes(4, "little") for _ in range(201))
        datum.model_input.add().encoded_text.tokens = tokens[:-4]
        target = datum.loss_fn_inputs.add(key="target_tokens").value
        target.dense, target.dtype = tokens[4:], INT32
        target.shape.append(200)
    encoded: bytes = message.SerializeToString()
    return encoded


async def connect(tenant: Tenant) -> None:
    """Opens connections that say nothing, and abandons requests of OpenAI's API."""
    host, port = tenant._url.removeprefix("http://").split(":")

    async def idle() -> None:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            await asyncio.sleep(20)
            writer.close()
        await asyncio.sleep(REST_SECONDS)

    async def abandons() -> None:
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 200, "n": 8}
        with suppress(TimeoutError):
            await asyncio.wait_for(rested(tenant.ask("/oai/api/v1/completions", body)), 2)

    await asyncio.gather(*[for_ever(idle) for _ in range(200)], *[for_ever(abandons) for _ in range(16)])


LOADS = {"samples": sample, "bodies": send_bodies, "models": train_models, "connects": connect}
"""What each of the four does, until it is ended."""


async def for_ever(work: Callable[[], Awaitable[None]]) -> None:
    """Does something again and again."""
    while True:
        await work()


async def rested(asking: Awaitable[tuple[int, Any]]) -> None:
    """Asks, and pauses after a refusal."""
    status, _ = await asking
    if status != 200:
        await asyncio.sleep(REST_SECONDS)


async def load(url: str) -> None:
    """Plays all four for ever; prints the statuses of each kind's answers each second."""
    timeout, seen = aiohttp.ClientTimeout(120), {name: Counter[str]() for name in LOADS}
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:

        async def tell() -> None:
            await asyncio.sleep(1)
            print(json.dumps(seen), flush=True)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(for_ever(tell))
            for name, work in LOADS.items():
                tasks.create_task(work(Tenant(url, KEYS[name], http, seen[name])))


class Fifth:
    """The key that trains."""

    def __init__(self, url: str, play: Callable[[tinker.ServiceClient, Callable[[], None]], list[float]]) -> None:
        """`play` trains the rounds with a client, calls what it is given once a round, and returns the losses."""
        warnings.simplefilter("ignore")
        self._url, self._play = url, play

    def rounds(self) -> tuple[list[float], list[float]]:
        """Trains the rounds with a new model; returns the losses, and the seconds of the small samples."""
        client, seconds = tinker.ServiceClient(base_url=self._url, api_key=KEYS["trains"]), list[float]()
        sampler: Any = client.create_sampling_client(base_model=MODEL).result()
        prompt, asked = tinker.ModelInput.from_ints([5, 6, 7]), tinker.SamplingParams(max_tokens=8, stop=[])

        def small() -> None:
            for _ in range(4):
                began = time.perf_counter()
                sampler.sample(prompt, 1, asked).result(600)
                seconds.append(time.perf_counter() - began)

        losses = self._play(client, small)
        client.close("success").result(60)
        return losses, seconds


def beside(fifth: Fifth, url: str, minutes: float, directory: Path) -> list[Figure]:
    """Plays the fifth key alone, and then beside the four."""
    fifth.rounds()  # what is computed for the first time is slower
    losses, alone = fifth.rounds()
    differing, slow, times, began = 0.0, list[float](), 0, time.monotonic()
    log = directory / "load.log"
    with Child("the load", [sys.executable, "-m", "perf.chaos.tenants", url], log=log) as process:
        before = cpu_of_roles(directory / "job", process.pid)
        while time.monotonic() < began + 60 * minutes or not times:
            found, seconds = fifth.rounds()
            differing = max(differing, *(abs(a - b) / abs(b) for a, b in zip(found, losses, strict=True)))
            slow, times = slow + seconds, times + 1
            say(f"  {times} times beside the others: {time.monotonic() - began:.0f} s, {percentile(slow):.2f} s")
            if process.code is not None:
                raise RuntimeError(f"the load has ended: {log.read_text()[-2000:]}")
        lasted, after = time.monotonic() - began, cpu_of_roles(directory / "job", process.pid)
    lines = list(json_lines(directory / "job" / "service" / "health.jsonl"))
    resident = [
        line["resident_bytes"] / 2**20 for line in lines if line["time"] > time.time() - (time.monotonic() - began)
    ]
    quarter = max(1, len(resident) // 4)
    parts = [each or [1.0] for each in (resident[-quarter:], resident[quarter : 2 * quarter])]
    later, earlier = map(min, parts)
    highest, highest_before = map(max, parts)
    say(f"answers: {log.read_text().splitlines()[-1][:400] if log.read_text() else 'none'}")
    return [
        Figure("times that the rounds were trained beside the others", times, ""),
        Figure("losses: the greatest difference from those alone", differing, "", 1e-4, timed=False),
        Figure("small samples", len(slow), ""),
        Figure("small sample alone: 99th percentile", percentile(alone), "s"),
        Figure("small sample beside the others: 99th percentile, over that", percentile(slow) / percentile(alone), "x", TIMES),
        Figure("small sample beside the others: median", sorted(slow)[len(slow) // 2], "s"),
        *(Figure(f"{name}: cores used beside the others", (after[name] - before[name]) / lasted, "") for name in before),
        Figure("service: resident size at most", max(resident, default=0.0), "MiB", MOST_RESIDENT, timed=False),
        Figure(
            "service: greatest resident size of the last quarter, over the second", highest / highest_before, "x",
            1.2, timed=False,
        ),
        Figure(
            "service: least resident size of the last quarter, over the second", later / earlier, "x",
            1.1 if minutes >= WARM_MINUTES else None, timed=False,
        ),
        Figure("service: p99 of the loop's lag, at most", max(1e3 * line["event_loop_lag/p99"] for line in lines), "ms"),
    ]  # fmt: skip


def cpu_of_roles(output: Path, load_pid: int) -> dict[str, float]:
    """Returns the processor time of each role until now, and of the load: on few cores they take it from each other."""
    found = {worker["name"].partition("_")[0]: int(worker["pid"]) for worker in read_workers(output) if worker["pid"]}
    found["load"] = load_pid
    return {name: sum(map(cpu_seconds, [pid, *descendants(pid)])) for name, pid in found.items()}


def percentile(seconds: list[float]) -> float:
    """Returns the 99th percentile."""
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))]


if __name__ == "__main__":
    asyncio.run(load(sys.argv[1]))
