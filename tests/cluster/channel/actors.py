"""The processes that the tests of channels kill, as a command: a kind, the channel, a directory, a name."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.consumer import ChannelConsumer
from counterpoint.cluster.channel.host import ChannelHost
from counterpoint.transport.process.launch import die_with_parent
from tests.support.polling import DEADLINE_SECONDS


def host(config: ChannelConfig, directory: Path) -> None:
    """Hosts until it is killed."""
    with ChannelHost(config, directory):
        print("ready", flush=True)
        signal.pause()


def holder(config: ChannelConfig, directory: Path, name: str) -> None:
    """Takes two records and holds them until it is killed."""
    with ChannelConsumer(config, directory, name, credit=2) as consumer:
        print(*[item.sequence for item in (consumer.get(), consumer.get()) if item is not None], flush=True)
        signal.pause()


@contextmanager
def actor(kind: str, config: ChannelConfig, directory: Path, name: str = "") -> Iterator[subprocess.Popen[str]]:
    """Runs one, which prints a line once it is connected; kills it at the end, by SIGKILL."""
    arguments = [kind, config.model_dump_json(), str(directory), name]
    command = [sys.executable, "-m", "tests.cluster.channel.actors", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_SECONDS)
        assert process.stdout is not None
        process.stdout.close()


def first_line(process: subprocess.Popen[str]) -> str:
    """Waits for the line that an actor prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def main() -> None:
    """Runs the actor that the command line names; ends with its parent."""
    logging.basicConfig(level=logging.INFO)
    die_with_parent(signal.SIGKILL, os.getppid())
    kind, config, directory, name = sys.argv[1:]
    given = ChannelConfig.model_validate_json(config)
    if kind == "host":
        host(given, Path(directory))
    else:
        holder(given, Path(directory), name)


if __name__ == "__main__":
    main()
