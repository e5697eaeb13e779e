"""The processes that the tests of channels kill, as a command: a kind, the channel, a directory, a name, the next channel."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.consumer import ChannelConsumer
from counterpoint.cluster.channel.exactly_once import CommitFile
from counterpoint.cluster.channel.host import ChannelHost
from counterpoint.cluster.channel.producer import ChannelProducer
from counterpoint.transport.process.launch import die_with_parent
from tests.support.polling import DEADLINE_SECONDS

RECORDS = 200


def host(config: ChannelConfig, directory: Path) -> None:
    """Hosts until it is killed."""
    with ChannelHost(config, directory):
        print("ready", flush=True)
        signal.pause()


def source(config: ChannelConfig, directory: Path, name: str) -> None:
    """Puts its records, in order, from the first that the channel lacks, as far as the file `gate` lets it; then ends."""
    gate = directory / "gate"
    with ChannelProducer(config, directory, name).blocking as producer:
        print("ready", flush=True)
        for position in range(producer.next_position, RECORDS):
            wait_for(lambda position=position: gate.stat().st_size > position, "the gate")  # type: ignore[misc]
            producer.send({"origin": name, "position": position})
        producer.end()


def stage(config: ChannelConfig, following: ChannelConfig, directory: Path, name: str) -> None:
    """Takes from one channel and puts into the next, leaving out every tenth record."""
    with (
        ChannelProducer(following, directory, name).blocking as producer,
        ChannelConsumer(config, directory, name, credit=4) as consumer,
    ):
        print("ready", flush=True)
        for item in consumer:
            if item.position % 10 == 9:
                producer.skip(item)
            else:
                producer.put(item.value | {"stage": name}, after=item)
            item.acknowledge()
        producer.end()


def trainer(config: ChannelConfig, directory: Path, name: str) -> None:
    """Commits every record, several at a time: its state is the list of all."""
    file = CommitFile(directory / f"{name}.commit")
    state = file.state or []
    with ChannelConsumer(config, directory, name, credit=8, sticky=True, committed=file.positions) as consumer:
        print("ready", flush=True)
        while (item := consumer.get()) is not None:
            batch = [item, *consumer.take_ready(2)]
            state += [[each.origin, each.position] for each in batch]
            for each in batch:
                file.positions.add(config.name, each.generation, each.sequence)
            file.commit(state, durable=False)
            for each in batch:
                each.acknowledge()
    file.close()


def holder(config: ChannelConfig, directory: Path, name: str) -> None:
    """Takes two records and holds them until it is killed."""
    with ChannelConsumer(config, directory, name, credit=2) as consumer:
        print(*[item.sequence for item in (consumer.get(), consumer.get()) if item is not None], flush=True)
        signal.pause()


@contextmanager
def actor(
    kind: str, config: ChannelConfig, directory: Path, name: str = "", following: ChannelConfig | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Runs one, and kills it at the end."""
    process = spawn(kind, config, directory, name, following)
    try:
        yield process
    finally:
        kill(process)


def spawn(
    kind: str, config: ChannelConfig, directory: Path, name: str = "", following: ChannelConfig | None = None
) -> subprocess.Popen[str]:
    """Starts one; it prints a line once it is connected."""
    arguments = [kind, config.model_dump_json(), str(directory), name]
    if following is not None:
        arguments.append(following.model_dump_json())
    command = [sys.executable, "-m", "tests.cluster.channel.actors", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


def kill(process: subprocess.Popen[str]) -> None:
    """Kills by SIGKILL and reaps."""
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
    kind, config, directory, name, *following = sys.argv[1:]
    given = ChannelConfig.model_validate_json(config)
    match kind:
        case "host":
            host(given, Path(directory))
        case "stage":
            stage(given, ChannelConfig.model_validate_json(following[0]), Path(directory), name)
        case _:
            {"source": source, "trainer": trainer, "holder": holder}[kind](given, Path(directory), name)


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Waits until `condition()` holds."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS} s for {what}"
        time.sleep(0.01)


if __name__ == "__main__":
    main()
