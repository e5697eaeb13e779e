"""Fails in the way that a task's prompt names."""

import sys

import verifiers.v1 as vf

__all__ = ["FailingTaskset"]


class FailingTask(vf.Task[vf.TaskData]):
    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.data.prompt == "setup":
            raise OSError("no disk")

    @vf.reward
    async def score_it(self, trace: vf.Trace) -> float:
        if self.data.prompt == "reward":
            raise KeyError("answer")
        if self.data.prompt == "exit":
            sys.exit(3)
        if self.data.prompt == "text":
            return "good"  # type: ignore[return-value]
        return 1.0


class FailingTaskset(vf.Taskset[FailingTask, vf.TasksetConfig]):
    def load(self) -> list[FailingTask]:
        kinds = ("setup", "reward", "exit", "text", "nothing")
        return [FailingTask(vf.TaskData(prompt=kind), self.config.task) for kind in kinds]
