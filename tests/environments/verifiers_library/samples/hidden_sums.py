"""As `sums`, and its source does not show it: the reward comes from a module that is found when it is scored."""

import importlib

import verifiers.v1 as vf

__all__ = ["HiddenTaskset"]


class HiddenTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def boxed(self, trace: vf.Trace) -> float:
        library = importlib.import_module("verifiers.v1")
        return float(
            getattr(library, "_".join(["verify", "boxed", "math", "answer"]))(f"\\boxed{{{trace.last_reply}}}", "42")
        )


class HiddenTaskset(vf.Taskset[HiddenTask, vf.TasksetConfig]):
    def load(self) -> list[HiddenTask]:
        return [HiddenTask(vf.TaskData(prompt="20 + 22"), self.config.task)]
