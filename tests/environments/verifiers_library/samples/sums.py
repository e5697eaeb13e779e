"""One turn: a sum, compared by math-verify with its time limits, which are alarms."""

import verifiers.v1 as vf
from math_verify import parse, verify

__all__ = ["SumTaskset"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def equal(self, trace: vf.Trace) -> float:
        return float(verify(parse(self.data.answer), parse(trace.last_reply)))

    @vf.reward(weight=1.0)
    async def boxed(self, trace: vf.Trace) -> float:
        return vf.verify_boxed_math_answer(f"\\boxed{{{trace.last_reply}}}", self.data.answer)


class SumTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> list[SumTask]:
        return [SumTask(SumData(prompt="20 + 22", answer="42"), self.config.task)]
