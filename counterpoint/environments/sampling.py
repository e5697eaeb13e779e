"""The sampling parameters of a model call, declared once: names, types, bounds, defaults and meaning.

`Sampling` has one line for each of them. All else follows from it: the keys of `[sampling]` and what overrides them (here), the
parameters of a request (`counterpoint/inference/base.py`), what is sent to our route and to vLLM's and what the plugin gives the
engine (`counterpoint/inference/wire.py`, `counterpoint/inference/clients/openai_client.py`,
`counterpoint/inference/plugin/routes.py`), and what an agent may ask of the gateway
(`counterpoint/environments/gateway/requests.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, create_model

from counterpoint.transport.config import Config
from counterpoint.transport.records import MOST_ALTERNATIVES

MOST_STOPS = 32
LONGEST_STOP = 256
"""Characters of one stop string."""

LONGEST_SCHEMA = 16_384
"""Characters of a JSON schema that constrains a call."""

StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]], Field(max_length=MOST_STOPS)
]
JsonSchema = Annotated[str, Field(max_length=LONGEST_SCHEMA)]
AlternativeCount = Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)]


class Sampling(Config):
    """How completions are sampled.

    The name of a field is its name in vLLM's `SamplingParams` and in vLLM's OpenAI API, too. vLLM refuses every request beyond
    the bounds (`vllm/sampling_params.py`). A default leaves the model's distribution as it is.
    """

    temperature: float = Field(default=1.0, ge=0.01, le=2, allow_inf_nan=False)
    """Softmax temperature. It is recorded with every turn: the trainer, too, computes log-probabilities at the temperature that a
    turn was generated at, so a run may be resumed with another one. vLLM raises one below 0.01 to that, and takes at most 2."""

    max_tokens: int = Field(default=256, ge=1, lt=2**31)
    """Longest completion of one turn."""

    top_p: float = Field(default=1.0, gt=0, le=1, allow_inf_nan=False)
    """Sample from the most probable tokens that together have this probability; 1: from all. See "Truncated sampling" in
    docs/training.md before setting this, `top_k` or `min_p`."""

    top_k: int = Field(default=0, ge=0, lt=2**31)
    """Sample from this many most probable tokens; 0: from all."""

    min_p: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Sample from tokens with at least this share of the most probable one's probability; 0: from all."""

    stop: StopStrings = []
    """Strings that end a completion once it contains one of them. The tokens that complete it are the completion's last: the
    model wrote them, and they are trained. One may be a special token; those that end a turn are known from the model."""


SAMPLED = frozenset(Sampling.model_fields)
"""The names of all."""

SHAPING = tuple(name for name in Sampling.model_fields if name not in ("max_tokens", "stop"))
"""The names of those that shape the distribution of a token. All are numbers. The others end a completion."""


def _leaves_the_conversation(kwargs: dict[str, Any]) -> dict[str, Any]:
    if taken := {"messages", "add_generation_prompt"} & kwargs.keys():
        raise ValueError(f"{', '.join(sorted(taken))}: set by the conversation itself; leave it out")
    return kwargs


class SamplingConfig(Sampling):
    """How completions are sampled."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_leaves_the_conversation)] = {}
    """Further variables for the model's chat template, such as `{ enable_thinking = false }` for Qwen3."""


_Model = TypeVar("_Model", bound=Config)


def _each_may_be_unset(model: type[_Model]) -> type[_Model]:
    """Returns `model` with all its fields optional: None by default, else within the field's bounds."""
    optional: dict[str, Any] = {
        name: (field.rebuild_annotation() | None, None) for name, field in model.model_fields.items()
    }
    return create_model(model.__name__, __base__=model, __doc__=model.__doc__, __module__=model.__module__, **optional)


@_each_may_be_unset
class SamplingOverrides(SamplingConfig):
    """Overrides of the run's `[sampling]` for one environment; see there for the keys.

    A key that is unset, which is None, is the run's. A list or table replaces the run's as a whole.
    """


class CallOverrides(SamplingOverrides):
    """Overrides of one model call. Unlike those of an environment, they may constrain what is written."""

    json_schema: JsonSchema = ""
    """A JSON schema as text: the completion is JSON that fits it. Empty: any text. The tokens are not trained: their
    log-probabilities are those of the constrained distribution, which the trainer's model does not have."""

    alternatives: AlternativeCount = 0
    """The most probable tokens to return at each place (`Turn.alternatives`). It has no effect on what is sampled."""
