"""Tools with state: a counter of the rollout that a tool server changes, and the reward reads."""

import verifiers.v1 as vf

__all__ = ["CountingTaskset"]


class CountingState(vf.State):
    count: int = 0


class CountingTools(vf.Toolset[vf.SharedToolsetConfig, CountingState]):
    TOOL_PREFIX = None

    @vf.tool
    async def add(self, amount: int) -> str:
        """Adds to the counter."""
        self.state.count += amount
        return str(self.state.count)


class CountingTask(vf.Task[vf.TaskData, CountingState]):
    @vf.reward
    async def counted(self, trace: vf.Trace) -> float:
        return float(trace.state.count == 5)


class CountingConfig(vf.TasksetConfig):
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class CountingTaskset(vf.Taskset[CountingTask, CountingConfig]):
    def load(self) -> list[CountingTask]:
        return [CountingTask(vf.TaskData(prompt="count to 5"), self.config.task)]

    @classmethod
    def toolsets(cls, config: CountingConfig) -> list[vf.Toolset]:
        return [CountingTools(config.tools)]


if __name__ == "__main__":
    CountingTools.run()
