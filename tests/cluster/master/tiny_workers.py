"""Workers for whole jobs: a service that waits, and a task that counts."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from counterpoint.cluster.worker import Worker


class Service(Worker):
    """Serves until it is stopped."""

    def status(self) -> str:
        return "serving"


class Counter(Worker):
    """Writes a line for each incarnation, and ends once the file `go` is there, or as the file `<its name>.end` says."""

    def start(self) -> None:
        directory = Path(self.context.directory)
        with (directory / f"{self.context.worker}.started").open("a") as file:
            file.write(f"{self.context.incarnation}\n")
        sys.stdout.write(f"{self.context.worker} has started\n")  # at once: `print` makes two writes
        end = directory / f"{self.context.worker}.end"
        while not (directory / "go").exists():
            if end.exists() and (how := end.read_text()):
                end.unlink()
                if how == "sys.exit":
                    sys.exit()
                threading.Thread(target=os._exit, args=[0]).start()
            if self.context.stop.wait(0.02):
                return


class Broken(Worker):
    """Fails in `setup`."""

    def setup(self) -> None:
        raise ValueError("the model is missing")
