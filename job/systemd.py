"""What a job sends to systemd, or to another supervisor at `$NOTIFY_SOCKET`."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cluster.notify import Heartbeat, notify
from cluster.worker_view import State


class SystemdNotifications:
    """Sends heartbeats, and each state of the job once until it changes. The two may be sent from different threads."""

    def __init__(self, services: Collection[str]) -> None:
        """`services` names the workers that must be ready before the job is: trainer and servers, not what it can do without."""
        self._services = services
        self._heartbeat = Heartbeat()
        self._sent: set[str] = set()

    def beat(self) -> None:
        """Sends a heartbeat. Call it from the loop that supervises the job, or between the parts of longer work."""
        self._heartbeat.beat()

    def report(self, job: State, workers: Mapping[str, State], progress: str) -> None:
        """Sends what has changed: the readiness of the services, the job's end, the runs' progress."""
        if all(workers[name] is State.READY for name in self._services):
            self.report_ready()
        if job is State.STOPPING:
            self._send("STOPPING=1")
        self._send(f"STATUS={job}: {progress}")

    def report_ready(self) -> None:
        """Sends that the job is ready."""
        self._send("READY=1")

    def _send(self, message: str) -> None:
        if message not in self._sent and notify(message):
            self._sent = {*(sent for sent in self._sent if not sent.startswith("STATUS=")), message}
