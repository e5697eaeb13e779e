"""Rewrites what the model said, ends a conversation early, and shortens a history: what must not be trained as it was read."""

import verifiers.v1 as vf

__all__ = ["RewritingTaskset"]


class RewritingTask(vf.Task[vf.TaskData]):
    @vf.intercept
    async def censor(self, response: vf.Response) -> vf.Response | None:
        if response.message.content != "secret":
            return None
        return response.model_copy(update={"message": response.message.model_copy(update={"content": "***"})})

    @vf.reward
    async def polite(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "please")


class RewritingTaskset(vf.Taskset[RewritingTask, vf.TasksetConfig]):
    def load(self) -> list[RewritingTask]:
        return [RewritingTask(vf.TaskData(prompt="ask"), self.config.task)]


class RewritingEnv(vf.Env[vf.SingleAgentEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            await talk.turn("again")


__all__ += ["RewritingEnv"]
