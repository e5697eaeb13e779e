"""Two agents: a solver, and a judge whose turns are never trained. Rewards are given over the whole episode."""

import verifiers.v1 as vf

__all__ = ["DebateEnv", "DebateTaskset"]


class DebateTask(vf.Task[vf.TaskData]):
    pass


class DebateTaskset(vf.Taskset[DebateTask, vf.TasksetConfig]):
    def load(self) -> list[DebateTask]:
        return [DebateTask(vf.TaskData(prompt=f"argue {side}"), self.config.task) for side in ("for", "against")]


class DebateConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig(max_turns=1)
    attempts: int = 2
    rounds: int = 1


class DebateEnv(vf.Env[DebateConfig]):
    async def setup(self, agents: vf.Agents) -> None:
        agents.judge.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        for _ in range(self.config.attempts):
            async with agents.solver.interaction(task) as talk:
                argument = await talk.turn()
                for _ in range(self.config.rounds - 1):
                    argument = await talk.turn("go on")
            await agents.judge.run(vf.Task(vf.TaskData(prompt=f"judge {argument.last_reply}")))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        verdicts = [trace.last_reply for trace in episode.by_agent["judge"]]
        for trace, verdict in zip(episode.by_agent["solver"], verdicts, strict=True):
            trace.record_reward("convinced", float(verdict == "yes"))
            trace.record_metric("best", float(verdict == "yes"))
