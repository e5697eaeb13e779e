"""Rewards of single turns: each right digit is worth something at its turn, and the whole something at the end."""

import verifiers.v1 as vf

__all__ = ["StepwiseEnv", "StepwiseTaskset"]


class StepwiseConfig(vf.TasksetConfig):
    beyond: bool = False
    """Names an answer that is not there."""


class StepwiseTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=0.5)
    async def digits(self, trace: vf.Trace) -> dict[str, float]:
        said = [message.content for message in trace.assistant_messages]
        beyond = {"turn/9": 1.0} if self.data.name == "beyond" else {}
        return {f"turn/{number}": 1.0 for number, text in enumerate(said) if text == str(number)} | beyond

    @vf.reward
    async def ended(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "2")

    @vf.intercept
    async def censor(self, response: vf.Response) -> vf.Response | None:
        if response.message.content != "secret":
            return None
        return response.model_copy(update={"message": response.message.model_copy(update={"content": "1"})})


class StepwiseTaskset(vf.Taskset[StepwiseTask, StepwiseConfig]):
    def load(self) -> list[StepwiseTask]:
        name = "beyond" if self.config.beyond else "count"
        return [StepwiseTask(vf.TaskData(name=name, prompt="count"), self.config.task)]


class StepwiseEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    runs: int = 1


class StepwiseEnv(vf.Env[StepwiseEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        for _ in range(self.config.runs):
            async with agents.agent.interaction(task) as talk:
                await talk.turn()
                for _ in range(2):
                    await talk.turn("go on")
