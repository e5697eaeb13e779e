"""The formats that the checker reads, as `docs/receipts.md` and `docs/contracts.md` describe them: what is used of each."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Literal, TypeVar

from msgspec import Raw, Struct, json

from counterpoint.verify.files import Unreadable

Format = Literal[1]


class Overlong(Struct):
    """The penalty for completions that are too long."""

    longest: int
    buffer: int
    penalty: float


class AdvantageRule(Struct):
    """How advantages are computed."""

    length_penalty: float
    overlong: Overlong | None = None
    discount: float = 1.0


class Filter(Struct):
    """A filter; each kind has some of the values."""

    kind: str
    mode: str
    log_probability_below: float | None = None
    share_above: float = 0.0
    ngram: int = 1
    window: int = 1
    minimum: int = 1


class Rules(Struct):
    """The configuration in force, as far as it is computed with."""

    advantage: AdvantageRule
    filters: list[Filter]
    max_off_policy_steps: int
    seed: int


class Begun(Struct):
    """The groups that began since the receipt before."""

    first: int
    examples: list[tuple[str, int]]


class Examples(Struct):
    """The examples of one environment."""

    size: int
    fingerprint: str | None = None
    curriculum: bool = False


class Receipt(Struct):
    """One step's receipt."""

    format: Format
    step: int
    previous: str
    batch: str
    rules: Rules
    begun: Begun
    shipped: list[int]
    unfinished: list[int]
    examples: dict[str, Examples]
    weights: dict[int, str]
    rollouts: list[str]
    records: str
    code: dict[str, str] = {}


class ItemReceipt(Struct, rename={"step": "item"}):
    """The receipt of an item of a driven run; `step` is the item's number."""

    format: Format
    step: int
    previous: str
    asked: str
    answer: str
    updates: int
    weights: dict[str, str] = {}


class RecordedTurn(Struct):
    """A turn of a record."""

    completion_tokens: int
    untrained_tokens: int
    policy_version: int
    prompt_tokens: int = 0
    prompt_hash: str | None = None
    completion_hash: str | None = None
    player: str = ""
    load: str = ""
    reward: float | None = None
    advantage: float | None = None

    @property
    def trained_tokens(self) -> int:
        """The tokens of its completion that its environment did not leave out."""
        return self.completion_tokens - self.untrained_tokens


class Played(Struct):
    """A rollout's record. `tokens` are those of its turns, from `tokens.bin` and not from the line, if they are there whole."""

    rollout_id: str
    group_id: int
    environment: str
    example_index: int
    reward: float | None
    advantage: float
    advantage_kind: str
    turns: list[RecordedTurn]
    player_rewards: dict[str, float] = {}
    player_advantages: dict[str, float] = {}
    error: str | None = None
    filtered_by: str | None = None
    dropped: str | None = None
    state: Raw = Raw(b"{}")
    tokens: Any = None

    @property
    def is_trained(self) -> bool:
        """Whether nothing keeps it from being trained."""
        return self.error is None and self.filtered_by is None and self.dropped is None


class ProbeFile(Struct):
    """What is read of a broadcast's `probe.json`."""

    digests: dict[str, dict[str, str]] = {}

    @property
    def digest(self) -> str:
        """The hash by which a receipt names the weights."""
        named = [f"{kind} {layer} {value}\n" for kind, each in self.digests.items() for layer, value in each.items()]
        return sha256("".join(sorted(named)).encode()).hexdigest()


class Trained(Struct):
    """What is said of a step: the digests of its batch and its weights, the newest receipt then, a driven run's item."""

    step: int
    batch: str = ""
    weights: str = ""
    head: str = ""
    item: int = 0


class TrainerState(Struct):
    """What is read of a trainer's `state.json`."""

    progress: Trained


Read = TypeVar("Read", bound=Struct)


def read(data: bytes, kind: type[Read]) -> Read:
    """Returns the object in a line of JSON. Raises `Unreadable`."""
    try:
        return json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is no {kind.__name__.lower()} of format 1: {error}") from None
