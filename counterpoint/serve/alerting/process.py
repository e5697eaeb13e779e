"""The process of `[alerts]`: looks at the job as the page does, and posts what is due to the webhook. No role waits for it.

`python -m counterpoint.serve.alerting.process DESCRIPTOR SPECIFICATION`: its parent and it exchange what
`counterpoint/job/tracking/sink_process.py` does. What was told is in `tracking/alerts.json`, so that a restart tells nothing
twice, and knows which problems have ended meanwhile.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterpoint.cluster.worker_view import ENDED
from counterpoint.job.directory import JOB_FILE
from counterpoint.job.serving.config import ServeConfig, url_of
from counterpoint.job.tracking.alerts import address_of, read_headers
from counterpoint.job.tracking.follow import State
from counterpoint.job.tracking.sink_process import SinkSpec, run_under_parent
from counterpoint.serve.alerting.notices import Ledger, Notice, body_of, end_of
from counterpoint.serve.alerting.webhook import LONGEST_PAUSE_SECONDS, Webhook
from counterpoint.serve.jobs import Jobs
from counterpoint.serve.readers.job_facts import JobFacts, JobReader
from counterpoint.serve.readers.problems import problems_of
from counterpoint.transport.files.lock import take_lock
from counterpoint.transport.files.untrusted import UntrustedFileError, read_json
from counterpoint.transport.loopback import WILDCARD_HOSTS

logger = logging.getLogger(__name__)

ATTEMPTS = 8
"""How often a message is tried before it is given up; the pauses double up to a minute: some four minutes."""

LAST_ATTEMPTS = 3
"""The same at the job's end."""

END_SECONDS = 10.0
"""How long the other workers' ends may take to be in `processes.json`, once the job has ended."""

MOST_JOB_BYTES = 2**26

_BESIDE = ("tracking", "serve")
"""Workers that end after the job's others, or whenever."""


class Sender:
    """Sends one message after the other, at most so many a minute, and tries again after pauses that double."""

    def __init__(self, hook: Webhook, per_minute: float) -> None:
        self._hook = hook
        self._per_minute = per_minute
        self._left, self._at = max(1.0, per_minute), time.monotonic()
        """Messages that may be sent now."""
        self._attempts = 0
        self._failures = 0
        self._not_before = 0.0
        self.given_up = 0

    def begin_again(self) -> None:
        """Counts the attempts at the next message from one, whatever happened to the one before."""
        self._attempts = 0

    def pause(self) -> float:
        """Returns the seconds before another message may be sent."""
        now = time.monotonic()
        self._left = min(max(1.0, self._per_minute), self._left + (now - self._at) * self._per_minute / 60)
        self._at = now
        return max(0.0, self._not_before - now, (1.0 - self._left) * 60 / self._per_minute)

    def send(self, body: dict[str, Any], attempts: int = ATTEMPTS) -> bool:
        """Tries to send a message. Returns whether it is done with: taken, or given up. If not, it is to be tried again."""
        answer = self._hook.post(body)
        if answer.taken:
            if self._failures:
                logger.info("%s takes alerts again", self._hook)
            self._left -= 1.0
            self._attempts = self._failures = 0
            return True
        self._attempts, self._failures = self._attempts + 1, self._failures + 1
        pause = answer.pause_seconds or min(2.0 ** min(self._failures - 1, 10), LONGEST_PAUSE_SECONDS)
        self._not_before = time.monotonic() + pause
        if not answer.final and self._attempts < attempts:
            if self._failures == 1:
                logger.warning("%s took no alert: %s; it is tried again", self._hook, answer.reason)
            return False
        self._attempts = 0
        self.given_up += 1
        logger.error("%s took no alert: %s; given up: %s", self._hook, answer.reason, body["text"].partition("\n")[0])
        return True


def run(
    spec: SinkSpec, over: Callable[[float], bool], beat: Callable[[int], None], hook: Webhook | None = None
) -> None:
    """See `sink_process.run`."""
    directory, options = Path(spec.job), spec.options
    tracking = directory / "tracking"
    tracking.mkdir(exist_ok=True)
    lock = take_lock(tracking / f"{spec.name}.lock", "another process sends this job's alerts; stop that one first")
    try:
        state = State(tracking / f"{spec.name}.json")
        url = address_of(options.get("url"), options.get("url_file"))
        hook = hook or Webhook(url, read_headers(options.get("headers_file")))
        told = state.content.get("told")
        ledger = Ledger(options["severities"], told if isinstance(told, dict) else {})
        sender = Sender(hook, options["per_minute"])
        job_id, page = next(iter(Jobs([directory]))).id, options.get("page") or page_of(directory)
        reader = JobReader(directory)
        sent, ending = 0, False
        while not ending:
            ledger.observe(problems_of(reader.read()), time.time())
            for notice in ledger.due(time.time()):
                beat(sent)
                if sender.pause() or not sender.send(body_of(notice, job_id, page, time.time())):
                    break
                sent += 1
                ledger.told(notice)
            state.content["told"] = ledger.saved
            state.save()
            beat(sent)
            ending = over(spec.poll_seconds)
        facts = _last_look(reader, beat)
        if facts.running and _at_work(facts):
            return  # it is we that are stopped: whoever follows the job next knows what was told
        _tell_end(sender, facts, job_id, page, beat)
        state.content["told"] = {}
        state.save()
    finally:
        os.close(lock)


def _last_look(reader: JobReader, beat: Callable[[int], None]) -> JobFacts:
    """Returns what is known once the other workers have ended, or after `END_SECONDS`."""
    until = time.monotonic() + END_SECONDS
    while True:
        facts = reader.read()
        if not facts.running or not _at_work(facts) or time.monotonic() > until:
            return facts
        beat(0)
        time.sleep(0.2)


def _at_work(facts: JobFacts) -> bool:
    return any(each["name"] not in _BESIDE and each["state"] not in ENDED for each in facts.workers)


def _tell_end(sender: Sender, facts: JobFacts, job_id: str, page: str, beat: Callable[[int], None]) -> None:
    """The last message waits for no rate, and not for long."""
    notice: Notice = end_of(facts)
    sender.begin_again()
    for attempt in range(LAST_ATTEMPTS):
        beat(0)
        if sender.send(body_of(notice, job_id, page, time.time()), LAST_ATTEMPTS):
            return
        time.sleep(2.0**attempt)


def page_of(directory: Path) -> str:
    """Returns the address of the job's own page. Empty: it has none or any port, or listens on every address without a name."""
    try:
        section = read_json(directory / JOB_FILE, MOST_JOB_BYTES).get("serve")
        serving = None if section is None else ServeConfig.model_validate(section)
    except (OSError, UntrustedFileError, ValueError):
        return ""
    if serving is None or not serving.port:
        return ""
    if serving.host in WILDCARD_HOSTS:  # none of them is an address that other machines have
        return f"https://{serving.names[0]}:{serving.port}/" if serving.names else ""
    return url_of(serving, serving.port)


def main() -> None:
    """Runs the process."""
    run_under_parent(run, int(sys.argv[1]), SinkSpec.of_json(sys.argv[2]))


if __name__ == "__main__":
    main()
