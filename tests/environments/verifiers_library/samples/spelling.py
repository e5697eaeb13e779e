"""One turn: write a word backwards. A reward of two weighted parts, and a metric."""

import verifiers.v1 as vf

__all__ = ["SpellingTaskset"]


class SpellingData(vf.TaskData):
    answer: str


class SpellingTask(vf.Task[SpellingData]):
    @vf.reward(weight=0.75)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) == len(self.data.answer))

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SpellingConfig(vf.TasksetConfig):
    words: list[str] = ["star", "moon", "sun"]
    """The words."""


class SpellingTaskset(vf.Taskset[SpellingTask, SpellingConfig]):
    def load(self) -> list[SpellingTask]:
        return [
            SpellingTask(SpellingData(prompt=f"reverse {word}", answer=word[::-1]), self.config.task)
            for word in self.config.words
        ]
