"""The roles: a trainer that drives an actor, a critic and two rollout workers through calls.

Any of them may be killed at any moment. The actor and the critic keep their networks, their optimizers and the newest
iteration's result in one file, written atomically after each update; `update` of an iteration that is in the file returns its
result and changes nothing. Collecting depends only on its arguments. So every method is idempotent, and calls are repeated until
they succeed; the trainer writes down each finished iteration and goes on after it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from counterpoint.cluster import RoleGroup, Worker, remote
from examples.ppo import rollout
from examples.ppo.cartpole import ACTIONS, OBSERVATIONS

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]

CALL_SECONDS = 120.0
"""Deadline of each call, restarts of the called worker included."""


class Learner(Worker):
    """A network that is updated once an iteration: what the actor and the critic have in common."""

    outputs: int
    seed: int

    def setup(self) -> None:
        """Builds the network, or reads it from its file."""
        import torch

        from examples.ppo import ppo

        torch.set_num_threads(1)
        self.network = ppo.network(OBSERVATIONS, self.outputs, self.seed)
        self.optimizer = torch.optim.Adam(self.network.parameters(), ppo.LEARNING_RATE)
        self._file = Path(self.context.directory) / f"{self.context.role}.pt"
        self.iteration, self.result = 0, 0.0
        if self._file.exists():
            saved = torch.load(self._file, weights_only=True)
            self.network.load_state_dict(saved["network"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.iteration, self.result = saved["iteration"], saved["result"]

    def improve(self, batch: dict[str, Array], iteration: int) -> float:
        """Makes the update; returns one number about it."""
        raise NotImplementedError

    @remote(idempotent=True)
    def update(self, iteration: int, batch: dict[str, Array]) -> float:
        """Makes the update of an iteration unless it is made already; returns its number."""
        import torch

        if iteration == self.iteration + 1:
            self.result = self.improve(batch, iteration)
            self.iteration = iteration
            saved = {
                "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "iteration": self.iteration,
                "result": self.result,
            }
            torch.save(saved, beside := self._file.with_suffix(".partial"))
            os.replace(beside, self._file)
        if iteration != self.iteration:
            raise ValueError(f"update {iteration} was asked for; the newest is {self.iteration}")
        return self.result


class Actor(Learner):
    """The policy."""

    outputs, seed = ACTIONS, 1

    def improve(self, batch: dict[str, Array], iteration: int) -> float:
        """Improves the policy; returns its entropy."""
        from examples.ppo import ppo

        return ppo.improve_policy(self.network, self.optimizer, batch, iteration)

    @remote(idempotent=True)
    def weights(self) -> dict[str, Array]:
        """Returns the policy's weights by name, float32."""
        return {name: tensor.numpy() for name, tensor in self.network.state_dict().items()}


class Critic(Learner):
    """The value function."""

    outputs, seed = 1, 2

    def improve(self, batch: dict[str, Array], iteration: int) -> float:
        """Fits the value function to the returns; returns its loss."""
        from examples.ppo import ppo

        return ppo.improve_values(self.network, self.optimizer, batch, iteration)

    @remote(idempotent=True)
    def values(self, observations: Array) -> Array:
        """Returns the values of observations `[T, N, 4]`: `[T, N]` float32."""
        import torch

        with torch.no_grad():
            tensor: torch.Tensor = self.network(torch.as_tensor(observations.copy()))
        found: Array = tensor.squeeze(-1).numpy()
        return found


class Rollout(Worker):
    """Plays."""

    @remote(idempotent=True)
    def collect(self, seeds: list[int], weights: dict[str, Array]) -> list[dict[str, Array]]:
        """Plays with these weights, once for each seed; see `rollout.collect`."""
        poles, steps = self.context.config["poles"], self.context.config["steps"]
        return [rollout.collect(weights, poles, steps, seed) for seed in seeds]


class Trainer(Worker):
    """Drives the others, iteration by iteration. Its lines are in `progress.jsonl`."""

    def start(self) -> None:
        """Runs the iterations that are not yet in the file."""
        file = Path(self.context.directory) / "progress.jsonl"
        for iteration in range(len(_lines(file)) + 1, self.context.config["iterations"] + 1):
            if self.context.stop.is_set():
                return
            _append(file, self.iterate(iteration))

    def iterate(self, iteration: int) -> dict[str, float]:
        """Makes one iteration; returns its line. Begun again after a death, it changes nothing that was made before."""
        actor, critic, players = (self.context.group(role) for role in ("actor", "critic", "rollout"))
        weights = actor.call_rank0("weights", timeout=CALL_SECONDS).result()
        seeds = [iteration * 1000 + position for position in range(self.context.config["rollouts"])]
        played = players.call_batch("collect", seeds, weights=weights, timeout=CALL_SECONDS).result()
        batch, lengths = self._batch(critic, played)
        improved = [group.call_rank0("update", iteration, batch, timeout=CALL_SECONDS) for group in (actor, critic)]
        entropy, value_loss = (call.result() for call in improved)
        length = float(np.mean(lengths))
        return {"iteration": iteration, "length": length, "entropy": entropy, "value_loss": value_loss}

    @staticmethod
    def _batch(critic: RoleGroup, played: list[dict[str, Array]]) -> tuple[dict[str, Array], Array]:
        """Puts the workers' poles side by side, and adds advantages and returns; flattens them to rows."""
        from examples.ppo import ppo

        names = ("observations", "next_observations", "actions", "log_probabilities", "fallen", "ended")
        together = {name: np.concatenate([part[name] for part in played], axis=1) for name in names}
        values, after = (
            critic.call_rank0("values", together[name], timeout=CALL_SECONDS).result()
            for name in ("observations", "next_observations")
        )
        rewards = np.ones_like(values)
        gain, returns = ppo.advantages(rewards, values, after, together["fallen"], together["ended"])
        columns = together | {"advantages": gain, "returns": returns}
        kept = ("observations", "actions", "log_probabilities", "advantages", "returns")
        rows = {name: np.ascontiguousarray(columns[name].reshape(-1, *columns[name].shape[2:])) for name in kept}
        return rows, np.concatenate([part["lengths"] for part in played])


def _lines(file: Path) -> list[dict[str, Any]]:
    """Reads the whole lines of a file that a killed process may have left with half a line, and cuts that half off."""
    if not file.exists():
        return []
    data = file.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(file, len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def _append(file: Path, line: dict[str, Any]) -> None:
    with file.open("ab") as output:
        output.write(json.dumps(line).encode() + b"\n")
        output.flush()
        os.fsync(output.fileno())
