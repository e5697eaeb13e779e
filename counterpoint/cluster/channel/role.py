"""A role that hosts channels: `worker = "counterpoint.cluster:HostWorker"`, with the channels as tables in its `config`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from counterpoint.cluster.channel.config import ChannelConfig
from counterpoint.cluster.channel.host import ChannelHost
from counterpoint.cluster.member import Stage
from counterpoint.cluster.spec import role_of
from counterpoint.cluster.worker import Context, Worker
from counterpoint.transport.config import Config

STOP_POLL_SECONDS = 0.2


class HostConfig(Config):
    """The `config` of a role that hosts channels."""

    channels: tuple[ChannelConfig, ...] = Field(min_length=1)
    """The channels, spread over the role's workers: the first one's host is rank 0, and so on, beginning again at rank 0."""


class HostWorker(Worker):
    """Hosts its share of the channels until the job stops. A service: peers may come back after a stream has ended."""

    def __init__(self, context: Context) -> None:
        """Reads the configuration."""
        super().__init__(context)
        channels = HostConfig.model_validate(dict(context.config)).channels
        self._channels = channels[context.rank :: context.count]
        self._hosts: list[ChannelHost] = []

    def setup(self) -> None:
        """Takes the addresses and what an earlier incarnation left in the journals."""
        for config in self._channels:
            self._hosts.append(ChannelHost(config, Path(self.context.directory)))
            self._hosts[-1].start()

    def status(self) -> str:
        """Returns each channel's records, and what keeps it from its work."""
        return ", ".join(host.status() for host in self._hosts)

    def start(self) -> None:
        """Serves until the job stops. Raises when a host fails, so that the worker is created again.

        Stops the job when a stream can never end: its consumers would wait for ever.
        """
        while not self.context.stop.wait(STOP_POLL_SECONDS):
            for host in self._hosts:
                if not host.wait(0.0) and (gone := self._gone(host.unended)) is not None:
                    self.context.stop_job(
                        f"channel {host.config.name} never ends: its producer {gone} has finished, and its host has not been "
                        "told of its `end`, or has lost it, as one without `directory` does when it dies",
                        code=1,
                    )

    def _gone(self, missing: frozenset[str]) -> str | None:
        """Returns a producer that will not end its part of a stream any more."""
        members = [each for role in {*map(role_of, missing)} for each in self.context.get_nodes_by_role(role)]
        return next((each.worker for each in members if each.worker in missing and each.stage is Stage.FINISH), None)

    def stop(self) -> None:
        """Frees the addresses and the journals."""
        for host in self._hosts:
            host.close()
