"""Several turns: the environment answers each guess, through an interaction with the agent. Its state is the trace's."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["GuessingEnv", "GuessingTaskset"]


class GuessingState(vf.State):
    guesses: int = 0


class GuessingData(vf.TaskData):
    secret: int


class GuessingTask(vf.Task[GuessingData, GuessingState]):
    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == str(self.data.secret))

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        return float(trace.state.guesses)


class GuessingTaskset(vf.Taskset[GuessingTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[GuessingTask]:
        secret = 0
        while True:
            secret = secret % 7 + 1
            yield GuessingTask(GuessingData(prompt="guess 1-7", secret=secret), self.config.task)


class GuessingConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    most: int = 3


class GuessingEnv(vf.Env[GuessingConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as game:
            said = await game.turn()
            for _ in range(self.config.most - 1):
                game.trace.state.guesses += 1
                if said.terminated or said.last_reply == str(task.data.secret):
                    return
                low = said.last_reply.isdigit() and int(said.last_reply) < task.data.secret
                said = await game.turn("higher" if low else "lower")
