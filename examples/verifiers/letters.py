"""An environment in the verifiers library's own API: a word backwards, with a second try. `configs/verifiers.toml` trains on it.

An environment of yours needs no more than this file: a taskset, its task with rewards, and, where an episode is more than one run
of one agent, an `Env`.
"""

from __future__ import annotations

import random
import string

import verifiers.v1 as vf

__all__ = ["LettersEnv", "LettersTaskset"]


class LettersData(vf.TaskData):
    """A word backwards."""

    answer: str


class LettersTask(vf.Task[LettersData]):
    """Scores a reply."""

    @vf.reward(weight=0.9)
    async def letters(self, trace: vf.Trace) -> float:
        """The share of letters in their place."""
        reply, answer = trace.last_reply, self.data.answer
        right = sum(ours == theirs for ours, theirs in zip(reply, answer, strict=False))
        return right / max(len(reply), len(answer))

    @vf.reward(weight=0.1)
    async def at_once(self, trace: vf.Trace) -> float:
        """Whether the first try was right."""
        return float(trace.num_turns == 1 and trace.last_reply == self.data.answer)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        """Whether the last try was right."""
        return float(trace.last_reply == self.data.answer)


class LettersConfig(vf.TasksetConfig):
    """Under `args.taskset`."""

    words: int = 1000
    longest: int = 4
    seed: int = 0


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    """Random words of three letters or more, none twice in a word."""

    def load(self) -> list[LettersTask]:
        """See `vf.Taskset`."""
        choose = random.Random(self.config.seed)
        lengths = [choose.randint(3, self.config.longest) for _ in range(self.config.words)]
        words = ["".join(choose.sample(string.ascii_lowercase, length)) for length in lengths]
        return [
            LettersTask(LettersData(prompt=f"reverse {word}", answer=word[::-1]), self.config.task) for word in words
        ]


class LettersEnvConfig(vf.EnvConfig):
    """Under `args.env`."""

    agent: vf.AgentConfig = vf.AgentConfig()
    tries: int = 2


class LettersEnv(vf.Env[LettersEnvConfig]):
    """Tells the agent that it was wrong, and lets it try again."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """See `vf.Env`."""
        async with agents.agent.interaction(task) as talk:
            said = await talk.turn()
            for _ in range(self.config.tries - 1):
                if said.terminated or said.last_reply == task.data.answer:
                    return
                said = await talk.turn("no")
