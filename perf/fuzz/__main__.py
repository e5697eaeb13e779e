"""Sends hostile requests to the gateway for agents, and watches what they are answered and the memory of its process.

    python -m perf.fuzz [--requests 1000000] [--seed 1] [--json]

A round opens new sessions of a policy that answers at once, sends some thousands of requests over several connections, and ends
the sessions. A request with the key of another, an ended or no rollout must be refused; none may be answered with 500 or not
at all. Resident size is read between rounds, after a first tenth that warms up; what it grew by later is bounded.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvloop
from rich.console import Console

from counterpoint.environments.chat import Chat
from counterpoint.environments.gateway import Gateway, Session
from counterpoint.environments.sampling import SamplingOverrides
from counterpoint.environments.scripted import ScriptedModel
from counterpoint.models.tiny_tokenizer import write_tokenizer
from counterpoint.orchestrator.step.boundary import give_memory_back
from counterpoint.transport.process.resident import resident_bytes
from counterpoint.transport.records import Turn
from perf.figures import Case, Figure
from perf.fuzz.hostile_requests import HostileRequests, Target
from perf.fuzz.raw_client import RawClient

CLIENTS = 16
REQUESTS_A_ROUND = 4_000
MOST_GROWTH_MB = 32.0
UNCONSTRAINED = 502
"""The status of an answer that its schema does not allow. The policy here constrains none, so such a turn is made and refused."""
_TEMPLATE = (
    "{{ tools | tojson if tools }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{{ message.tool_calls | tojson if message.tool_calls }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class AnsweringModel(ScriptedModel):
    """A policy that answers any prompt with the same word."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat, ())
        self.made = 0
        """The turns that it has made."""
        self._completion = np.array([*chat.encode("yes"), chat.stop_token_ids[0]], np.int32)

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingOverrides | None = None) -> Turn:
        """See `environments.base.Model`."""
        prompt = np.asarray(prompt_ids, np.int32)
        if not prompt.size:
            raise ValueError("an empty prompt")
        self.made += 1
        written = self._completion
        return Turn(prompt, written, np.zeros(len(written), np.float32), 0, "stop")


@dataclass
class Findings:
    """What the requests were answered."""

    statuses: Counter[int] = field(default_factory=Counter)
    """The number of answers by status; 0: the connection was closed without an answer."""
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """Requests whose answer was wrong, or missing; the first few."""
    wrong: int = 0
    turns: int = 0
    resident: list[int] = field(default_factory=list)
    """Bytes after each round."""
    seconds: float = 0.0

    @property
    def growth_mb(self) -> float:
        """The share by which the largest resident size of the last nine tenths exceeds that of the first."""
        warm = max(1, len(self.resident) // 10)
        return (max(self.resident[warm:], default=0) - max(self.resident[:warm])) / 1e6

    def note(self, kind: str, content: bytes, statuses: set[int], allowed: frozenset[int] | None) -> None:
        """Counts the answers to one request, and what is wrong with them."""
        self.kinds[kind] += 1
        self.statuses.update(statuses)
        if 500 in statuses or (allowed is not None and not statuses <= allowed):
            self.wrong += 1
            if len(self.faults) < 10:
                self.faults.append(f"{kind}: {sorted(statuses)}: {content[:2000]!r}")

    def case(self) -> Case:
        """Returns the figures."""
        total = sum(self.kinds.values())
        figures = [Figure(f"requests: {kind}", count, "") for kind, count in sorted(self.kinds.items())]
        figures += [
            Figure(f"answers: {status or 'none'}", count, "") for status, count in sorted(self.statuses.items())
        ]
        return Case(
            "gateway-fuzz",
            [
                Figure("requests", total, ""),
                Figure("requests a second", total / self.seconds, "/s"),
                *figures,
                Figure("turns", self.turns, ""),
                Figure("wrong answers", self.wrong, "", 0, timed=False),
                Figure(
                    "resident size after the first tenth",
                    self.resident[max(0, len(self.resident) // 10 - 1)] / 1e6,
                    "MB",
                ),
                Figure("resident size at the end", self.resident[-1] / 1e6, "MB"),
                Figure("growth of the resident size", self.growth_mb, "MB", MOST_GROWTH_MB, timed=False),
            ],
        )


async def fuzz(requests: int, seed: int, chat: Chat, report: bool = False) -> Findings:
    """Sends so many requests; returns what came of them."""
    findings, source, gateway = Findings(), HostileRequests(seed), Gateway()
    began, left, ended = time.monotonic(), requests, Target("never", "began")
    try:
        while left:
            count = min(left, REQUESTS_A_ROUND)
            ended = await _round(gateway, source, count, chat, ended, findings)
            left -= count
            gc.collect()
            give_memory_back()  # as the orchestrator does after each step
            findings.resident.append(resident_bytes())
            if report and len(findings.resident) % 25 == 1:
                print(
                    f"{requests - left:,} requests, {findings.resident[-1] / 1e6:.0f} MB", file=sys.stderr, flush=True
                )
    finally:
        await gateway.close()
    findings.seconds = time.monotonic() - began
    return findings


async def _round(
    gateway: Gateway, source: HostileRequests, count: int, chat: Chat, ended: Target, findings: Findings
) -> Target:
    models = [AnsweringModel(chat) for _ in range(3)]
    refused = -findings.statuses[UNCONSTRAINED]
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(gateway.session(model)) for model in models]
        targets = [_target(session) for session in sessions]
        port = int(sessions[0].base_url.split(":")[2].split("/")[0])
        numbers = itertools.count()

        async def send() -> None:
            client = RawClient(port)
            try:
                while (number := next(numbers)) < count:
                    own, other = targets[number % 3], targets[(number + 1) % 3]
                    request = source.next(own, other, ended)
                    if request.reusable:
                        statuses = {await client.ask(request.content)}
                    else:
                        statuses = await client.ask_alone(request.content)
                    findings.note(request.kind, request.content, statuses, request.allowed)
            finally:
                await client.close()

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(send())
        answered = sum(len(session.turns) for session in sessions)
    refused += findings.statuses[UNCONSTRAINED]
    findings.turns += answered
    if answered != (made := sum(model.made for model in models) - refused):
        findings.wrong += 1
        findings.faults.append(f"{made} turns were made and not refused, and {answered} captured")
    return targets[0]


def _target(session: Session) -> Target:
    return Target(session.base_url.split("/")[3], session.api_key)


def make_chat(directory: Path) -> Chat:
    """A chat with a tokenizer of bytes, whose template reads tools."""
    write_tokenizer(directory, longest=1 << 20)
    (directory / "chat_template.jinja").write_text(_TEMPLATE)
    return Chat(directory)


def main() -> int:
    """Runs the command. Returns 1 after a wrong answer, or if memory grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        chat = make_chat(Path(directory))
        findings = uvloop.run(fuzz(arguments.requests, arguments.seed, chat, report=not arguments.json))
    for fault in findings.faults:
        print(fault, file=sys.stderr)
    case = findings.case()
    if arguments.json:
        print(json.dumps([case.as_json()], indent=2))
    else:
        Console().print(case.as_table())
    return int(not case.held)


if __name__ == "__main__":
    sys.exit(main())
