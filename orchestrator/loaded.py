"""Loads what the names in a run's configuration stand for: environments, evaluations, chat template, advantage function."""

from __future__ import annotations

from dataclasses import dataclass

from environments.chat import Chat
from environments.registry import load_environment
from orchestrator.evaluation.loading import LoadedEvaluation, load_evaluation
from orchestrator.rollouts.play import LoadedEnvironment
from orchestrator.run_directory import refusal
from orchestrator.step.advantages import Advantage, load_advantage, try_advantage
from run.config import RunConfig


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the names in a configuration stand for."""

    chat: Chat
    chats: dict[str, Chat]
    """By environment: `chat` with the environment's template variables."""
    advantage: Advantage
    environments: dict[str, LoadedEnvironment]
    evaluations: list[LoadedEvaluation]


def load(config: RunConfig) -> Loaded:
    """Loads environments, advantage function and chat template. Raises what `refusal` returns."""
    try:
        environments = {e.name: LoadedEnvironment(e, load_environment(e)) for e in config.environments}
        advantage = load_chosen_advantage(config)
        chat = Chat(config.model)
        evaluations = [load_evaluation(config, evaluation, chat) for evaluation in config.evaluations]
        return Loaded(chat, chats_of(config, chat), advantage, environments, evaluations)
    except ValueError as error:
        raise refusal(error) from error


def load_chosen_advantage(config: RunConfig) -> Advantage:
    """Loads the advantage function and tries it with a made-up group. Raises `ValueError`."""
    advantage = load_advantage(config.advantage)
    try_advantage(advantage, config.schedule.group_size)
    return advantage


def chats_of(config: RunConfig, chat: Chat) -> dict[str, Chat]:
    """Returns the chat of each environment, with its template variables. Raises `ValueError`."""
    return {e.name: chat.with_template_kwargs(config.sampling_of(e).chat_template_kwargs) for e in config.environments}
